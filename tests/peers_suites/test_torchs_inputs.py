"""What torch's library of tests changes in a process when it is imported is put back."""

import hypothesis
import torch
import torchs_inputs


def test_flags_of_backends_may_be_set_and_laws_are_drawn_as_before():
    assert torchs_inputs.module_db
    assert not torch.backends.flags_frozen()
    assert hypothesis.settings.default == hypothesis.settings.get_profile("laws")
