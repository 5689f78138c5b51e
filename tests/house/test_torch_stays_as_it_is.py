"""torch is left as it is: no function, method or class of torch's is another after the first weight than before."""

import subprocess
import sys

LOOK = """
import importlib, sys, types
import torch, torch.fx, torch.ao.nn.qat
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

def held():
    found = {}
    for path, module in list(sys.modules.items()):
        if path.partition(".")[0] == "torch" and isinstance(module, types.ModuleType):
            for name, value in list(vars(module).items()):
                if callable(value):
                    found[path, name] = value
                if isinstance(value, type):
                    found.update({(path, name, key): member for key, member in list(vars(value).items())})
    return found

def changed(before, after):
    # torch replaces some of its own, as it draws docstrings or starts its compiler: what is ours says so.
    for key, value in before.items():
        other = after.get(key)
        other = getattr(other, "__func__", other)
        if after.get(key) is not value and getattr(other, "__module__", "").startswith("stiefelkit"):
            yield key
        if key[0].startswith(("torch.nn.utils", "torch.nn.modules", "torch.optim.optimizer")):
            if callable(value) and after.get(key) is not value:
                yield key

before = held()
assert ("torch.nn.utils.parametrize", "transfer_parametrizations_and_params") in before
assert ("torch.nn.modules.module", "Module", "load_state_dict") in before
assert ("torch.nn.utils.weight_norm", "WeightNorm", "apply") in before
import stiefelkit as sk
model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
sk.orthogonal(model, where="*.weight", init="haar")
sk.orthogonal(nn.Linear(4, 4), "weight", "stiefel")
model.load_state_dict(model.state_dict())
optimizer = torch.optim.SGD(sk.optim.parameter_groups(model, lr=0.1))
model(torch.ones(4)).sum().backward()
optimizer.step()
sk.bake(model)
print(*set(changed(before, held())), sep="\\n", end="")
"""


def test_nothing_of_torchs_is_replaced() -> None:
    done = subprocess.run([sys.executable, "-c", LOOK], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
