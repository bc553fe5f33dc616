//! The kernels' tests: PyTorch's results on fixed operands, a naive reference on random ones, and
//! hostile signatures.

mod convolution;
mod documents;
mod generate;
mod golden;
mod hostile;
mod norm;
mod optim;
mod random;
mod reference;
mod shared;
