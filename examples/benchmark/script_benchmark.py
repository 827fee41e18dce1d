# SPDX-License-Identifier: BSD-3-Clause
"""Writes a BERT and a ResNet, traced and scripted, for script_benchmark.cpp to load. (ResNet: of basic blocks.)"""

import argparse
import os

import torch
from torch import nn
from torch.nn import functional as F

from models import Bert, BertLayer, initialize


class ScriptedLayer(BertLayer):
    """A layer without a function in forward(), which torch.jit.script does not take."""

    def split(self, t):
        return t.view(t.size(0), t.size(1), self.heads, -1).transpose(1, 2)

    def forward(self, x):
        attended = F.scaled_dot_product_attention(
            self.split(self.query(x)), self.split(self.key(x)), self.split(self.value(x)))
        y = self.norm1(x + self.output(attended.transpose(1, 2).reshape(x.shape)))
        return self.norm2(y + self.down(F.gelu(self.up(y))))


class Block(nn.Module):
    def __init__(self, inputs, channels, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, channels, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.shortcut = nn.Identity() if inputs == channels else nn.Sequential(
            nn.Conv2d(inputs, channels, 1, stride, bias=False), nn.BatchNorm2d(channels))

    def forward(self, x):
        y = self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x)))))
        return torch.relu(y + self.shortcut(x))


class ResNet(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, 1, 1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.blocks = nn.Sequential(
            Block(channels, channels, 1), Block(channels, 2 * channels, 2),
            Block(2 * channels, 4 * channels, 2), Block(4 * channels, 8 * channels, 2))
        self.head = nn.Linear(8 * channels, 10)

    def forward(self, x):
        x = self.blocks(torch.relu(self.norm(self.stem(x))))
        return self.head(x.mean((2, 3)))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True)
    parser.add_argument("--preset", default="small", choices=["tiny", "small"])
    options = parser.parse_args()
    os.makedirs(options.out, exist_ok=True)
    tiny = options.preset == "tiny"
    width, channels, side = (32, 8, 8) if tiny else (128, 32, 32)

    bert = Bert({"batch": 4, "length": 32, "layers": 2, "width": width, "heads": 2,
                 "vocabulary": 2048})
    bert.layers = nn.ModuleList(ScriptedLayer(width, 2) for _ in range(2))
    models = {"bert": (bert, tuple(bert.make_batch()[:2])),
              "resnet": (ResNet(channels), (torch.randn(4, 3, side, side),))}
    for name, (module, inputs) in models.items():
        initialize(module, 0)
        for training in (False, True):
            module.train(training)
            for kind, script in (("traced", torch.jit.trace(module, inputs, check_trace=False)),
                                 ("scripted", torch.jit.script(module))):
                task = "training" if training else "inference"
                script.save(os.path.join(options.out, f"{name}-{kind}-{task}.pt"))
        torch.save(list(inputs), os.path.join(options.out, f"{name}-inputs.pt"))


if __name__ == "__main__":
    main()
