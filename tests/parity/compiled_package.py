# SPDX-License-Identifier: BSD-3-Clause
"""Makes the package of tests/autocast/compiled_code_test.cpp.

    python tests/parity/compiled_package.py FILE.pt2
"""
import sys

import torch
import torch._inductor


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution = torch.nn.Conv2d(3, 8, 3, padding=1)
        self.linear = torch.nn.Linear(8, 4)

    def forward(self, x):
        return self.linear(self.convolution(x).relu().mean((2, 3)))


def main():
    torch.manual_seed(0)
    program = torch.export.export(Model().eval(), (torch.zeros(2, 3, 8, 8),))
    torch._inductor.aoti_compile_and_package(program, package_path=sys.argv[1])


if __name__ == "__main__":
    main()
