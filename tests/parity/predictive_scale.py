# SPDX-License-Identifier: BSD-3-Clause
"""Walks a model of GradScalerOptions::predictive() and writes it, for tests/internals/predictive_scale_test.cpp.

Refresh with
    python tests/parity/predictive_scale.py > tests/parity/predictive_scale.txt

A walk begins with
    walk init_scale min_scale max_scale hysteresis growth_interval forgives_bad_losses
and goes on with an iteration a line:
    B M S A V W     B: 1 if bad; M: the largest magnitude of the scaled gradients, or, where bad losses are forgiven,
                    inf for such a loss; S: the scale afterwards;
                    A, V, W: mean of log2 of the magnitudes, over the latest and over more, and mean of their squares
"""

import math
import random

HALF_MAX = 65504.0


class Average:
    """Of all values so far, each weighed by DECAY to the power of its age."""

    def __init__(self, decay):
        self.decay, self.values = decay, []

    def add(self, value):
        self.values.append(value)

    def get(self):
        weights = [self.decay**age for age in range(len(self.values))]
        return sum(w * v for w, v in zip(weights, reversed(self.values))) / sum(weights) if weights else 0.0


class Predictive:
    def __init__(self, init, low, high, hysteresis, interval, forgives):
        self.forgives = forgives
        self.scale, self.low, self.high = init, low, high
        self.credit = self.hysteresis = hysteresis
        self.interval = interval
        self.fast, self.slow, self.square = Average(0.99), Average(0.9995), Average(0.9995)
        self.aim, self.good, self.previous_bad = 13.0, 0, False

    def sample(self, x):
        self.fast.add(x)
        self.slow.add(x)
        self.square.add(x * x)

    def target(self, latest=-math.inf):
        spread = math.sqrt(max(self.square.get() - self.slow.get() ** 2, 0.0))
        return 2.0 ** math.floor(self.aim - max(self.fast.get() + 3.09 * spread, latest) + 1e-6)

    def set(self, scale):
        self.scale = min(max(scale, self.low), self.high)

    def iterate(self, bad, largest):
        if self.forgives and largest == math.inf:
            if bad:
                self.previous_bad = True
                return
            largest = 0.0
        bits = math.log2(self.scale)
        knows = bool(self.fast.values)
        if bad:
            self.good = 0
            self.credit = max(self.credit - 1, 0)
            if knows and not self.previous_bad:
                mean = self.fast.get()
                self.sample(max(min(16 - bits, mean + 4), mean))
            if self.credit == 0:
                if knows and not self.previous_bad:
                    self.aim = max(self.aim - 1, -18.0)
                if self.scale > 1:
                    retreat = max(self.scale / 4096, 1.0) if knows else 1.0
                else:
                    retreat = self.scale / 2
                self.set(min(retreat, self.target()) if knows else retreat)
        else:
            self.good += 1
            grows = self.good == self.interval
            if grows:
                self.good, self.credit = 0, self.hysteresis
                self.aim = min(self.aim + 1, 13.0)
            if largest > 0:
                latest = math.log2(largest) - bits
                self.sample(latest)
                self.set(self.target(latest))
            elif knows:
                self.set(self.target())
            elif grows:
                self.set(self.scale * 2)
        self.previous_bad = bad


def walk(rng, steps, init, low, high, hysteresis, interval, size, noise, hidden, burst, forgives=0):
    print("walk", repr(init), repr(low), repr(high), hysteresis, interval, forgives)
    model = Predictive(init, low, high, hysteresis, interval, forgives)
    for step in range(steps):
        magnitude = size * 2 ** rng.gauss(0, noise) * (1000 if step % 50 >= 45 and burst else 1)
        if rng.random() < 0.05:
            magnitude = rng.choice([0.0, math.inf, 0.0, 1e-12])
        largest = magnitude * model.scale
        bad = largest * hidden > HALF_MAX
        if forgives and rng.random() < 0.2:
            largest, bad = math.inf, rng.random() < 0.8
        elif forgives:
            largest = min(largest, 3.4e38)
        largest = float("%.6g" % largest)
        model.iterate(bad, largest)
        averages = (model.fast.get(), model.slow.get(), model.square.get())
        print(int(bad), largest, model.scale, *("%.12g" % x for x in averages))


def main():
    rng = random.Random(0)
    print("# Written by predictive_scale.py")
    for init, low, high, hysteresis, interval, size, noise, hidden, burst in [
        (65536.0, 2.0**-126, 2.0**32, 1, 2000, 1.0, 0.5, 1, True),
        (2.0**30, 2.0**-126, 2.0**32, 1, 10, 30.0, 1.5, 1, False),
        (65536.0, 2.0**-126, 2.0**32, 2, 7, 1e-4, 0.5, 64, True),
        (1024.0, 64.0, 4096.0, 1, 5, 1.0, 1.0, 1, True),
        (3.0, 2.0**-126, 2.0**32, 3, 3, 1e-9, 0.3, 1, False),
        (65536.0, 2.0**-126, 2.0**32, 1, 4, 1e7, 2.0, 1, True),
        (8.0, 2.0**-126, 2.0**32, 1, 3, 0.0, 0.0, 1, False),
    ]:
        walk(rng, 70, init, low, high, hysteresis, interval, size, noise, hidden, burst)
    for init, hysteresis, interval, size, noise, hidden, burst in [
        (65536.0, 1, 2000, 1.0, 0.5, 1, True),
        (2.0**30, 2, 5, 30.0, 1.5, 64, True),
        (2.0, 1, 3, 1e-9, 0.3, 1, False),
    ]:
        walk(rng, 70, init, 2.0**-126, 2.0**32, hysteresis, interval, size, noise, hidden, burst, forgives=1)


if __name__ == "__main__":
    main()
