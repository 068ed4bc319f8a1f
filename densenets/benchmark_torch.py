"""The PyTorch contenders of `densenets.benchmark`: torchvision's DenseNet, plain and checkpointed."""

import time

import torch
import torchvision

from densenets import zoo


def prepare(model, batch_size, mode, contender, task):
    """A step, and what was measured of it; as in `benchmark_worker`. PyTorch runs it eagerly whatever the mode is called."""
    if mode == "xla":
        raise ValueError("PyTorch has no XLA here")
    torch.manual_seed(0)
    size, network = _network(model, memory_efficient=contender == "torch_checkpoint")
    images, labels = torch.randn(batch_size, 3, size, size), torch.zeros(batch_size, dtype=torch.long)
    optimizer = torch.optim.SGD(network.parameters(), 0.1, momentum=0.9, nesterov=True)

    def train():
        optimizer.zero_grad(set_to_none=True)
        loss = torch.nn.functional.cross_entropy(network(images), labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    def infer():
        with torch.no_grad():
            return network(images).sum()

    network.train(task == "training")
    step = train if task == "training" else infer
    start = time.perf_counter()
    step()
    first = time.perf_counter() - start
    return step, {
        "peak_bytes": _peak(step),
        "first_step_seconds": first,
        "parameters": sum(p.numel() for p in network.parameters()),
    }


def _peak(step):
    """The most that lives at once during a step above what lives before it, from the profiler's record of allocations."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    alive = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        alive += event.nbytes()
        peak = max(peak, alive)
    return peak


def _network(model, memory_efficient):
    """The image size and the network: DenseNet-BC for 32x32 images for `LxK`, else the named one."""
    if model.replace("x", "").isdigit():
        depth, growth_rate = map(int, model.split("x"))
        arguments = {"growth_rate": growth_rate, "block_config": ((depth - 4) // 6,) * 3, "num_init_features": 2 * growth_rate}
        network = torchvision.models.DenseNet(num_classes=10, memory_efficient=memory_efficient, **arguments)
        network.features.conv0 = torch.nn.Conv2d(3, 2 * growth_rate, 3, padding=1, bias=False)
        for name in ("norm0", "relu0", "pool0"):
            setattr(network.features, name, torch.nn.Identity())
        return 32, network
    arguments = zoo.VARIANTS[model].arguments
    network = torchvision.models.DenseNet(
        growth_rate=arguments["growth_rate"],
        block_config=arguments["blocks"],
        num_init_features=2 * arguments["growth_rate"],
        memory_efficient=memory_efficient,
    )
    return 224, network
