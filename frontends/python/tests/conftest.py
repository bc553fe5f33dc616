"""What all tests share."""

import torch

# Sums do not depend on the number of threads then.
torch.set_num_threads(1)
