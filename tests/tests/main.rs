//! Tests over several crates: a module for each subject.

mod accumulate;
mod allocator;
mod attention;
mod blocks;
mod budgets;
mod choices;
mod determinism;
mod docs;
mod filetests;
mod fixtures;
mod fuse;
mod gpu;
mod kernels;
mod loss;
mod mutants;
mod ops;
mod planners;
mod protrain;
mod ptx;
mod remat;
mod schedules;
mod served;
mod simplify;
mod simulator;
mod tables;
mod updates;
