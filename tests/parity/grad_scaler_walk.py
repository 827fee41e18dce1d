# SPDX-License-Identifier: BSD-3-Clause
"""Walks torch.amp.GradScaler at random and writes what it did.

tests/grad_scaler/grad_scaler_walk_test.cpp compares.

Refresh with
    python tests/parity/grad_scaler_walk.py > tests/parity/grad_scaler_walk.txt

One line is one call, in Python and in C++; numbers read back exactly. A walk begins with
    walk init_scale growth_factor backoff_factor growth_interval
and goes on with
    backward G...       gradients of the loss, unscaled, in order of optimizer, group and element
    unscale I           unscale_ of optimizer I
    clip I MAX_NORM     clip_grad_norm_ of its parameters
    clip_value I MAX    clip_grad_value_
    spoil I X           X put into its first gradient by hand
    step I S            step; S is 1 if it stepped
    update              update()
    set X               update(X)
    interval N          set_growth_interval(N)
    load S G B N T      load_state_dict
    state S T W...      what there is now: scale, growth tracker, weights
"""

import math
import random
import struct

import torch

# Optimizers: lr, momentum, fused, shapes of the parameters of each group.
OPTIMIZERS = [
    (0.5, 0.0, False, [[(2,), (1, 2)], [(1,)]]),
    (0.25, 0.5, False, [[(3,)]]),
    (0.125, 0.0, True, [[(2,), (2,)]]),
]


def say(*words):
    def text(x):
        if not isinstance(x, float):
            return str(x)
        return f"{x:.9g}" if math.isnan(x) or x == fp32(x) else f"{x:.17g}"

    print(*map(text, words))


def fp32(x):
    if not math.isfinite(x):
        return x
    return struct.unpack("f", struct.pack("f", x))[0]


def walk(rng, iterations, init, growth, backoff, interval):
    say("walk", init, growth, backoff, interval)
    scaler = torch.amp.GradScaler(
        "cpu", init_scale=init, growth_factor=growth, backoff_factor=backoff, growth_interval=interval)
    optimizers = []
    for lr, momentum, fused, groups in OPTIMIZERS:
        groups = [{"params": [torch.nn.Parameter(torch.ones(s)) for s in g]} for g in groups]
        optimizers.append(torch.optim.SGD(groups, lr=lr, momentum=momentum, fused=fused))
    owned = [[p for g in o.param_groups for p in g["params"]] for o in optimizers]
    parameters = [p for ps in owned for p in ps]
    bad_run = 0

    for _ in range(iterations):
        bad_run = max(bad_run - 1, 0) if rng.random() < 0.9 else rng.randint(0, 4)
        for _ in range(rng.choice((1, 1, 1, 2))):  # accumulation
            coefficients = [torch.tensor([rng.randint(-64, 64) / 128 for _ in range(p.numel())]).view(p.shape)
                            for p in parameters]
            if bad_run or rng.random() < 0.1:
                for _ in range(rng.choice((1, 1, 3))):
                    victim = rng.choice(coefficients).view(-1)
                    victim[rng.randrange(victim.numel())] = rng.choice((math.inf, -math.inf, math.nan))
            say("backward", *(x for c in coefficients for x in c.flatten().tolist()))
            loss = sum((p * c).sum() for p, c in zip(parameters, coefficients))
            scaler.scale(loss).backward()
        order = [i for i in range(len(optimizers)) if rng.random() < 0.9] or [0]
        rng.shuffle(order)
        for i in order:
            if rng.random() < 0.4:
                say("unscale", i)
                scaler.unscale_(optimizers[i])
                choice = rng.random()
                if choice < 0.4:
                    limit = rng.choice((0.25, 1.0))
                    say("clip", i, limit)
                    torch.nn.utils.clip_grad_norm_(owned[i], limit)
                elif choice < 0.6:
                    say("clip_value", i, 0.25)
                    torch.nn.utils.clip_grad_value_(owned[i], 0.25)
                elif choice < 0.7:
                    x = rng.randint(-64, 64) / 64
                    say("spoil", i, x)
                    owned[i][0].grad.view(-1)[0] = x
                if rng.random() < 0.1:
                    continue  # unscaled and not stepped
            before = [p.detach().clone() for p in owned[i]]
            found = sum(not g.isfinite().all() for p in owned[i] for g in [p.grad])
            already = scaler._per_optimizer_states[id(optimizers[i])]["found_inf_per_device"]
            bad = sum(float(v) for v in already.values()) if already else found
            scaler.step(optimizers[i])
            say("step", i, int(not bad))
            assert not bad or all(torch.equal(a, b) for a, b in zip(before, owned[i]))
        for o in optimizers:
            o.zero_grad()
        choice = rng.random()
        if choice < 0.04:
            x = fp32(2.0 ** rng.uniform(-3, 20))
            say("set", x)
            scaler.update(x)
        else:
            # Nothing is known of an iteration in which no optimizer was touched.
            say("update")
            scaler.update()
        if rng.random() < 0.02:
            n = rng.randint(scaler._get_growth_tracker() + 1, scaler._get_growth_tracker() + 6)
            say("interval", n)
            scaler.set_growth_interval(n)
        if rng.random() < 0.02:
            n = rng.randint(2, 6)
            state = {"scale": fp32(2.0 ** rng.uniform(0, 16)), "growth_factor": rng.uniform(1.1, 4.0),
                     "backoff_factor": rng.uniform(0.1, 0.9), "growth_interval": n,
                     "_growth_tracker": rng.randrange(n)}
            say("load", *state.values())
            scaler.load_state_dict(state)
        weights = [x for p in parameters for x in p.detach().flatten().tolist()]
        say("state", scaler.get_scale(), scaler._get_growth_tracker(), *weights)
        assert all(math.isfinite(w) for w in weights)


if __name__ == "__main__":
    torch.set_num_threads(1)
    rng = random.Random(2026)
    print("# Written by grad_scaler_walk.py with torch", torch.__version__.split("+")[0])
    walk(rng, 120, 65536.0, 2.0, 0.5, 4)
    walk(rng, 120, 1000.0, 1.7, 0.3, 3)
    walk(rng, 60, 0.75, 3.0, 0.9, 1)
