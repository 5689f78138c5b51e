"""The inputs that torch tests its own modules and optimizers with, from `torch.testing._internal`."""

from typing import Any
from unittest.mock import patch

import hypothesis
import pytest
import torch

pytest.importorskip("expecttest", reason="needs the extra [interop]")
# Its import freezes the flags of backends and loads a profile of hypothesis, both for all of this process.
with patch.object(torch.backends, "disable_global_flags"):
    from torch.testing._internal import common_modules, common_optimizers
hypothesis.settings.load_profile("laws")

module_db: list[Any] = list(common_modules.module_db)
optim_db: list[Any] = list(common_optimizers.optim_db)
with_flags: Any = common_optimizers._get_optim_inputs_including_global_cliquey_kwargs
for_all_optimizers: Any = common_optimizers.get_error_inputs_for_all_optims

__all__ = ["for_all_optimizers", "module_db", "optim_db", "with_flags"]
