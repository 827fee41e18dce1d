# SPDX-License-Identifier: BSD-3-Clause
"""The twins of models/*.h: the same modules under the same names, the same data, the same losses."""

import math

import torch
from torch import nn
from torch.nn import functional as F


class Recipe:
    """How a workload's weights are updated; the twin of Recipe in workload.h."""

    def __init__(self, optimizer="adam", learning_rate=1e-3, clip_norm=0.0, accumulate=1,
                 warmup_steps=0, weight_average=False):
        self.optimizer = optimizer
        self.learning_rate = learning_rate
        self.clip_norm = clip_norm
        self.accumulate = accumulate
        self.warmup_steps = warmup_steps
        self.weight_average = weight_average


@torch.no_grad()
def initialize(module, seed):
    torch.manual_seed(seed)
    for name, parameter in module.named_parameters():
        if parameter.dim() >= 2:
            fan_in = parameter.numel() // parameter.size(0)
            parameter.normal_(0.0, math.sqrt(1.0 / fan_in))
        else:
            parameter.fill_(1.0 if name.endswith("weight") else 0.0)


# ---- Feed-forward --------------------------------------------------------------------------------

COLUMNS = [(1116, 81), (8, 5), (4, 3), (13, 7), (32, 11), (3, 3), (26, 10), (27, 10), (5, 4), (4, 3),
           (4, 3), (24, 9), (9, 6), (13, 7), (53, 15), (22, 9), (7, 5), (7, 5), (4, 3), (9, 6)]
CONTINUOUS = 16


class FeedForward(nn.Module):
    def __init__(self, sizes):
        super().__init__()
        self.batch, hidden = sizes["batch"], sizes["hidden"]
        self.embeddings = nn.ModuleList(nn.Embedding(count, width) for count, width in COLUMNS)
        self.norm = nn.BatchNorm1d(CONTINUOUS)
        width = CONTINUOUS + sum(width for _, width in COLUMNS)
        self.layers = nn.Sequential(
            nn.Linear(width, hidden), nn.ReLU(), nn.BatchNorm1d(hidden),
            nn.Linear(hidden, hidden // 2), nn.ReLU(), nn.BatchNorm1d(hidden // 2),
            nn.Linear(hidden // 2, 1))
        self.recipe = Recipe()

    def make_batch(self):
        categories = [torch.randint(count, (self.batch,)) for count, _ in COLUMNS]
        values = torch.randn(self.batch, CONTINUOUS)
        return [torch.stack(categories, 1), values, values.sum(1).gt(0).float()]

    def forward(self, categories, values):
        parts = [embed(column) for embed, column in zip(self.embeddings, categories.unbind(1))]
        parts.append(self.norm(values))
        return self.layers(torch.cat(parts, 1)).squeeze(1)

    def predict(self, batch):
        return self(batch[0], batch[1])

    def loss(self, batch):
        return F.binary_cross_entropy_with_logits(self(batch[0], batch[1]), batch[2])


# ---- UNet ----------------------------------------------------------------------------------------


def unet_block(inputs, outputs):
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True),
        nn.Conv2d(outputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))


class UNet(nn.Module):
    def __init__(self, sizes):
        super().__init__()
        self.batch, self.side, c = sizes["batch"], sizes["side"], sizes["channels"]
        self.down, self.up, self.merge = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        inputs = 3
        for outputs in (c, 2 * c, 4 * c, 8 * c):
            self.down.append(unet_block(inputs, outputs))
            inputs = outputs
        for outputs in (4 * c, 2 * c, c):
            self.up.append(nn.ConvTranspose2d(2 * outputs, outputs, 2, stride=2))
            self.merge.append(unet_block(2 * outputs, outputs))
        self.head = nn.Conv2d(c, 9, 1)
        self.recipe = Recipe()

    def make_batch(self):
        images = torch.randn(self.batch, 3, self.side, self.side)
        bits = images.gt(0).long().unbind(1)
        return [images, bits[0] + 2 * bits[1] + 4 * bits[2]]

    def forward(self, x):
        skipped = []
        for level, block in enumerate(self.down):
            if level > 0:
                x = torch.max_pool2d(x, 2)
            x = block(x)
            skipped.append(x)
        for level, (up, merge) in enumerate(zip(self.up, self.merge)):
            x = merge(torch.cat((skipped[2 - level], up(x)), 1))
        return self.head(x)

    def predict(self, batch):
        return self(batch[0])

    def loss(self, batch):
        return F.cross_entropy(self(batch[0]), batch[1])


# ---- BERT ----------------------------------------------------------------------------------------


class BertLayer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.value, self.output = nn.Linear(width, width), nn.Linear(width, width)
        self.norm1 = nn.LayerNorm(width, eps=1e-12)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm2 = nn.LayerNorm(width, eps=1e-12)

    def forward(self, x):
        def split(t):
            return t.view(t.size(0), t.size(1), self.heads, -1).transpose(1, 2)

        attended = F.scaled_dot_product_attention(
            split(self.query(x)), split(self.key(x)), split(self.value(x)))
        y = self.norm1(x + self.output(attended.transpose(1, 2).reshape(x.shape)))
        return self.norm2(y + self.down(F.gelu(self.up(y))))


class Bert(nn.Module):
    def __init__(self, sizes):
        super().__init__()
        self.batch, self.length = sizes["batch"], sizes["length"]
        self.vocabulary, width = sizes["vocabulary"], sizes["width"]
        self.words = nn.Embedding(self.vocabulary, width)
        self.positions = nn.Embedding(512, width)
        self.segments = nn.Embedding(2, width)
        self.norm = nn.LayerNorm(width, eps=1e-12)
        self.layers = nn.ModuleList(
            BertLayer(width, sizes["heads"]) for _ in range(sizes["layers"]))
        self.head = nn.Linear(width, 2)
        self.recipe = Recipe(optimizer="adamw", learning_rate=1e-4, clip_norm=1.0)

    def make_batch(self):
        tokens = torch.randint(self.vocabulary, (self.batch, self.length))
        segments = torch.randint(2, (self.batch, self.length))
        return [tokens, segments, tokens.argmax(1), tokens.argmin(1)]

    def forward(self, tokens, kinds):
        places = torch.arange(tokens.size(1), device=tokens.device)
        x = self.words(tokens) + self.positions(places) + self.segments(kinds)
        x = self.norm(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

    def predict(self, batch):
        return self(batch[0], batch[1])

    def loss(self, batch):
        first, last = self(batch[0], batch[1]).unbind(2)
        return (F.cross_entropy(first, batch[2]) + F.cross_entropy(last, batch[3])) / 2


# ---- Checkerboard --------------------------------------------------------------------------------


class Checkerboard(nn.Sequential):
    def __init__(self, sizes):
        channels, layers = sizes["channels"], []
        for inputs in (2, channels, channels):
            layers += [nn.Conv2d(inputs, channels, 1), nn.BatchNorm2d(channels), nn.ReLU()]
        super().__init__(*layers, nn.Conv2d(channels, 1, 1))
        self.side = sizes["side"]
        self.recipe = Recipe()

    def make_batch(self):
        along = torch.arange(self.side).float() / self.side
        field = (along * 8).floor().long().remainder(2)
        shade = field.unsqueeze(0).logical_xor(field.unsqueeze(1)).float()
        grid = torch.meshgrid(along, along, indexing="xy")
        return [torch.stack(grid).unsqueeze(0), shade.unsqueeze(0).unsqueeze(0)]

    def predict(self, batch):
        return self(batch[0])

    def loss(self, batch):
        return F.mse_loss(self(batch[0]), batch[1])


# ---- GPT -----------------------------------------------------------------------------------------


class GptBlock(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.attention, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return self.forward_after(x, None)[0]

    def forward_after(self, x, cache):
        def split(t):
            return t.view(t.size(0), t.size(1), self.heads, -1).transpose(1, 2)

        query, key, value = map(split, self.attention(self.norm1(x)).chunk(3, -1))
        if cache is not None:
            key, value = torch.cat((cache[0], key), 2), torch.cat((cache[1], value), 2)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=cache is None)
        y = x + self.output(attended.transpose(1, 2).reshape(x.shape))
        return y + self.down(F.gelu(self.up(self.norm2(y)))), (key, value)


class Gpt(nn.Module):
    def __init__(self, sizes):
        super().__init__()
        self.batch, self.length = sizes["batch"], sizes["length"]
        width = sizes["width"]
        self.words, self.positions = nn.Embedding(256, width), nn.Embedding(self.length, width)
        self.blocks = nn.Sequential(
            *(GptBlock(width, sizes["heads"]) for _ in range(sizes["layers"])))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        self.recipe = Recipe(optimizer="adamw", clip_norm=1.0, accumulate=2)

    def make_batch(self):
        return [torch.randint(256, (self.batch, self.length + 1))]

    def forward(self, text):
        places = torch.arange(text.size(1), device=text.device)
        x = self.words(text) + self.positions(places)
        return self.head(self.norm(self.blocks(x)))

    def forward_after(self, text, caches):
        before = 0 if caches[0] is None else caches[0][0].size(2)
        places = torch.arange(before, before + text.size(1), device=text.device)
        x = self.words(text) + self.positions(places)
        for i, block in enumerate(self.blocks):
            x, caches[i] = block.forward_after(x, caches[i])
        return self.head(self.norm(x))

    def predict(self, batch):
        return self(batch[0][:, :-1])

    def loss(self, batch):
        logits = self(batch[0][:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), batch[0][:, 1:].flatten())


class GptGeneration(Gpt):
    cached = False

    def predict(self, batch):
        text, prompt = batch[0], self.length // 2
        caches, logits = [None] * len(self.blocks), None
        for end in range(prompt, self.length + 1):
            if self.cached:
                start = 0 if end == prompt else end - 1
                logits = self.forward_after(text[:, start:end], caches)[:, -1]
            else:
                logits = self(text[:, :end])[:, -1]
        return logits


class GptCached(GptGeneration):
    cached = True


# ---- YOLO ----------------------------------------------------------------------------------------


class Conv(nn.Module):
    def __init__(self, inputs, outputs, kernel, stride=1, padding=None):
        super().__init__()
        padding = kernel // 2 if padding is None else padding
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, padding, bias=False)
        self.norm = nn.BatchNorm2d(outputs, eps=1e-3, momentum=0.03)

    def forward(self, x):
        return F.silu(self.norm(self.conv(x)))


class Bottleneck(nn.Module):
    def __init__(self, channels, add):
        super().__init__()
        self.add = add
        self.first = Conv(channels, channels, 1)
        self.second = Conv(channels, channels, 3)

    def forward(self, x):
        y = self.second(self.first(x))
        return x + y if self.add else y


class C3(nn.Module):
    def __init__(self, inputs, outputs, depth, add=True):
        super().__init__()
        self.through = Conv(inputs, outputs // 2, 1)
        self.past = Conv(inputs, outputs // 2, 1)
        self.merge = Conv(outputs, outputs, 1)
        self.blocks = nn.Sequential(*(Bottleneck(outputs // 2, add) for _ in range(depth)))

    def forward(self, x):
        return self.merge(torch.cat((self.blocks(self.through(x)), self.past(x)), 1))


class Pooling(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.first = Conv(channels, channels // 2, 1)
        self.second = Conv(channels * 2, channels, 1)

    def forward(self, x):
        levels = [self.first(x)]
        for _ in range(3):
            levels.append(torch.max_pool2d(levels[-1], 5, 1, 2))
        return self.second(torch.cat(levels, 1))


class Yolo(nn.Module):
    def __init__(self, sizes):
        super().__init__()
        self.sizes, c = sizes, sizes["channels"]
        self.values = sizes["classes"] + 5
        self.stem = Conv(3, c, 6, 2, 2)
        self.down1, self.c1 = Conv(c, 2 * c, 3, 2), C3(2 * c, 2 * c, 1)
        self.down2, self.c2 = Conv(2 * c, 4 * c, 3, 2), C3(4 * c, 4 * c, 2)
        self.down3, self.c3 = Conv(4 * c, 8 * c, 3, 2), C3(8 * c, 8 * c, 3)
        self.down4, self.c4 = Conv(8 * c, 16 * c, 3, 2), C3(16 * c, 16 * c, 1)
        self.pooling = Pooling(16 * c)
        self.narrow1, self.up1 = Conv(16 * c, 8 * c, 1), C3(16 * c, 8 * c, 1, False)
        self.narrow2, self.up2 = Conv(8 * c, 4 * c, 1), C3(8 * c, 4 * c, 1, False)
        self.down5, self.out2 = Conv(4 * c, 4 * c, 3, 2), C3(8 * c, 8 * c, 1, False)
        self.down6, self.out3 = Conv(8 * c, 8 * c, 3, 2), C3(16 * c, 16 * c, 1, False)
        self.heads = nn.ModuleList(
            nn.Conv2d(inputs, 3 * self.values, 1) for inputs in (4 * c, 8 * c, 16 * c))
        self.recipe = Recipe(optimizer="sgd", learning_rate=0.01, clip_norm=10.0,
                             accumulate=max(1, sizes["nominal_batch"] // sizes["batch"]),
                             warmup_steps=8, weight_average=True)

    def make_batch(self):
        batch, side = self.sizes["batch"], self.sizes["side"]
        targets, classes = self.sizes["targets"], self.sizes["classes"]
        tensors = [torch.rand(batch, 3, side, side)]
        image = torch.arange(batch).repeat_interleave(targets)
        for stride in (8, 16, 32):
            cells = side // stride
            place = torch.cat([torch.randperm(3 * cells * cells)[:targets] for _ in range(batch)])
            anchor = place.floor_divide(cells * cells)
            row = place.remainder(cells * cells).floor_divide(cells)
            tensors.append(torch.stack((image, anchor, row, place.remainder(cells))))
            tensors.append(torch.cat((torch.rand(batch * targets, 2),
                                      torch.rand(batch * targets, 2).mul(2.0).add(0.5)), 1))
        kind = torch.randint(classes, (batch * targets, 1))
        tensors.append(torch.zeros(batch * targets, classes).scatter_(1, kind, 1.0))
        return tensors

    def forward(self, images):
        def grow(x):
            return F.interpolate(x, scale_factor=2.0, mode="nearest")

        p3 = self.c2(self.down2(self.c1(self.down1(self.stem(images)))))
        p4 = self.c3(self.down3(p3))
        p5 = self.pooling(self.c4(self.down4(p4)))
        n5 = self.narrow1(p5)
        n4 = self.narrow2(self.up1(torch.cat((grow(n5), p4), 1)))
        small = self.up2(torch.cat((grow(n4), p3), 1))
        medium = self.out2(torch.cat((self.down5(small), n4), 1))
        large = self.out3(torch.cat((self.down6(medium), n5), 1))
        outputs = []
        for head, x in zip(self.heads, (small, medium, large)):
            y = head(x)
            y = y.view(y.size(0), 3, self.values, y.size(2), y.size(3))
            outputs.append(y.permute(0, 1, 3, 4, 2).contiguous())
        return outputs

    def predict(self, batch):
        return self(batch[0])[-1]

    def loss(self, batch):
        outputs, classes = self(batch[0]), batch[-1]
        box_loss = object_loss = class_loss = None

        def add(total, term):
            return term if total is None else total + term

        for scale, (output, balance) in enumerate(zip(outputs, (4.0, 1.0, 0.4))):
            image, anchor, row, column = batch[1 + 2 * scale].unbind(0)
            found = output[image, anchor, row, column]
            centre = found[:, 0:2].sigmoid() * 2 - 0.5
            extent = (found[:, 2:4].sigmoid() * 2).square()
            iou = complete_iou(torch.cat((centre, extent), 1), batch[2 + 2 * scale])
            box_loss = add(box_loss, (1.0 - iou).mean())
            wanted = torch.zeros(output.shape[:4], dtype=output.dtype, device=output.device)
            wanted[image, anchor, row, column] = iou.detach().clamp_min(0).to(wanted.dtype)
            object_loss = add(object_loss, F.binary_cross_entropy_with_logits(
                output[..., 4], wanted) * balance)
            class_loss = add(class_loss, F.binary_cross_entropy_with_logits(found[:, 5:], classes))
        return (box_loss * 0.05 + object_loss * 1.0 + class_loss * 0.5) * batch[0].size(0)


def complete_iou(a, b):
    eps = 1e-7
    a_low, a_high = a[:, 0:2] - a[:, 2:4] / 2, a[:, 0:2] + a[:, 2:4] / 2
    b_low, b_high = b[:, 0:2] - b[:, 2:4] / 2, b[:, 0:2] + b[:, 2:4] / 2

    def area(extent):  # in fp32; not prod(1), whose backward reads the device to look for zeros
        return extent[:, 0].float() * extent[:, 1]

    common = area((torch.minimum(a_high, b_high) - torch.maximum(a_low, b_low)).clamp_min(0))
    iou = common / (area(a[:, 2:4]) + area(b[:, 2:4]) - common + eps)
    hull = torch.maximum(a_high, b_high) - torch.minimum(a_low, b_low)
    diagonal = hull.square().sum(1) + eps
    distance = (a[:, 0:2] - b[:, 0:2]).square().sum(1)

    def angle(box):
        return torch.atan(box[:, 2] / (box[:, 3] + eps))

    shape = (angle(b) - angle(a)).square() * (4.0 / (math.pi * math.pi))
    with torch.no_grad():
        weight = shape / (shape - iou + (1.0 + eps))
    return iou - (distance / diagonal + shape * weight)


MODELS = {"feed_forward": FeedForward, "unet": UNet, "bert": Bert, "gpt": Gpt, "yolo": Yolo,
          "checkerboard": Checkerboard, "gpt_generation": GptGeneration, "gpt_cached": GptCached}
