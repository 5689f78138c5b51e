"""The asv suite: precision and time over the commits of the project. README.md says how to run and read it."""

import os

# before torch is imported: it makes its pool of threads once
os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"
# asv forks after the imports, and a child cannot use a CUDA driver that its parent has started: NVML does not start it
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
