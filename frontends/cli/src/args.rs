//! The command line. Every option says what it takes, and every subcommand shows an example.

mod checkpoints;
mod data;
mod lora;
mod metrics;
mod patterns;

use crate::disk::Disk;
use crate::page::update_name;
use crate::size::{parse_budget, parse_bytes, parse_count, parse_dim, parse_rate};
use addresses::generate::Model;
pub(crate) use checkpoints::{CheckpointArgs, CheckpointCommand, CheckpointCommandArgs, Every};
use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args, Parser, Subcommand};
use codegen::kernels::Target;
pub(crate) use data::DataArgs;
pub(crate) use lora::{AddLora, CONFIG as PEFT_CONFIG};
pub(crate) use metrics::{EvalArgs, MetricsArgs};
use onnx::BatchNorm;
use papers::estimate;
use papers::offload::Algorithm;
use papers::protrain::Fixed;
use passes::decide::Planner;
use passes::graph::criterion::Loss;
use passes::graph::loss::Chunks;
use passes::graph::optimizer::{Master, Optimizer, Rounding};
use passes::graph::precision::Precision;
use passes::graph::quantize::Base;
use passes::graph::reduction::Combination;
use passes::graph::scale::LossScale;
use passes::pipeline::{self, Budget, Kernels};
use passes::schedule::order::Update;
pub(crate) use patterns::{Group, Paths};
use placement::{Effort, Method};
use std::path::{Path, PathBuf};
use trace::Format;

/// Compiles a training step so that it fits into a given amount of memory.
///
/// The input is one step (forward, backward, optimizer) as a .pt2 file, or a forward alone, a .pt2
/// or an .onnx file, with --differentiate. Before the first step runs,
/// Lighterage decides which tensors are kept, swapped and recomputed, gives each tensor an address,
/// and proves the result.
#[derive(Parser, Debug)]
#[command(name = "lighterage", version, arg_required_else_help = true, after_help = EXIT_CODES)]
pub(crate) struct Cli {
    /// Print more on standard error: each pass and draft of the compiler; -vv prints all
    #[arg(short, long, global = true, action = clap::ArgAction::Count)]
    pub(crate) verbose: u8,
    /// What to do.
    #[command(subcommand)]
    pub(crate) command: Command,
}

const EXIT_CODES: &str = "Exit codes: 0 done; 1 the system refused, for example a full disk; \
    2 wrong usage or input; 3 no plan fits; 4 training has NaNs or infinities to save; 101 a bug; \
    130 Ctrl-C, 143 SIGTERM, 129 SIGHUP";

/// A subcommand.
#[derive(Subcommand, Debug)]
pub(crate) enum Command {
    /// Print the step of a model as text: phases, modules, states
    #[command(after_help = "Examples:\n  lighterage import gpt2.pt2 -o gpt2.ir\n  \
        lighterage import forward.pt2 --differentiate --loss cross-entropy --shift\n  \
        lighterage import resnet.onnx --dim batch=8 --batch-norm train\n\n\
        docs/autodiff.md says which forwards can be differentiated, docs/onnx.md how to export an \
        .onnx file that can be trained.")]
    Import(ImportArgs),
    /// Plan a step: report what it needs, what was decided, and what other budgets would cost
    #[command(
        after_help = "Example:\n  lighterage plan gpt2.pt2 --optimizer adamw --device cpu \
            --budget 60%\n  \
        lighterage plan gpt2.pt2 --optimizer adamw --budget 60% --curve --report plan.html\n  \
        lighterage plan forward.pt2 --differentiate --loss cross-entropy --optimizer adamw\n\n\
        With --dump-ir-after and without --dump-dir the dump goes to standard output and the \
        report to standard error."
    )]
    Plan(PlanArgs),
    /// Compile a step to a .lit file, which contains everything needed to run it
    #[command(
        after_help = "Example:\n  lighterage compile gpt2.pt2 --optimizer adamw --budget 60% -o \
            step.lit\n  \
        lighterage compile gpt2.pt2 --optimizer adamw --emit ptx --target sm_90 > kernels.ptx"
    )]
    Compile(CompileArgs),
    /// Train: run a step repeatedly on batches
    #[command(
        after_help = "Examples:\n  lighterage train gpt2.pt2 --optimizer adamw --lr 1e-3 --budget \
            50% \
        --batches data.safetensors \\\n      --steps 60 --init normal:0.02 --seed 0 --save \
        out.safetensors\n  \
        lighterage train step.lit --batches data.safetensors --steps 60\n  \
        lighterage train forward.pt2 --differentiate --loss cross-entropy --optimizer adamw \
        \\\n      --batches data.safetensors --steps 60\n  \
        lighterage train step.lit --tokens train.bin --token-labels next --shuffle-data \
        --steps 1000 \\\n      \
        --eval held.bin --eval-every 100 --patience 3 --metrics run.jsonl\n\n\
        DATA holds the tensors batch.K.INPUT; step i, from 0, uses batch i mod K. With \
        --micro-batches N a step uses N \
        batches, one after the other. docs/training.md describes data, metrics and evaluation."
    )]
    Train(Box<TrainArgs>),
    /// List, verify and convert checkpoints
    #[command(after_help = "Examples:\n  lighterage checkpoint list runs/gpt2\n  \
        lighterage checkpoint verify runs/gpt2\n  \
        lighterage checkpoint convert runs/gpt2 -o model.safetensors\n\n\
        `train --checkpoints` writes them, and `train --resume` goes on from them. \
        docs/checkpoints.md describes the files.")]
    Checkpoint(CheckpointCommandArgs),
    /// Write trained values back into the .onnx file that they came from
    #[command(after_help = "Example:\n  \
        lighterage train model.onnx --differentiate --optimizer adamw --steps 60 \\\n      \
        --batches data.safetensors --save trained.safetensors\n  \
        lighterage export model.onnx --states trained.safetensors -o trained.onnx\n\n\
        Everything else in the file stays. External data goes to a new file beside the output, \
        trained.onnx.data.")]
    Export(ExportArgs),
    /// Report what a .lit file contains, without running any of it: machine code and its signature,
    /// pools, kernels, inputs, outputs, states
    #[command(after_help = "Example:\n  lighterage inspect step.lit")]
    Inspect(InspectArgs),
    /// Explain why a tensor was kept, swapped or recomputed, and what the alternatives would cost
    #[command(
        after_help = "Example:\n  lighterage explain gpt2.pt2 --optimizer adamw --budget 60% \
            %gelu_1"
    )]
    Explain(ExplainArgs),
    /// Measure the time of a model's ops and of the link on this machine, for --profile
    #[command(
        after_help = "Example:\n  lighterage profile gpt2.pt2 --device cpu -o cpu.prof\n  \
        lighterage plan gpt2.pt2 --optimizer adamw --budget 60% --profile cpu.prof"
    )]
    Profile(ProfileArgs),
    /// Plan a step for each machine: where it fits, by which means, and how fast it would be
    #[command(after_help = "Examples:\n  lighterage fit gpt2.pt2\n  \
        lighterage fit gpt2.pt2 --precision bf16 --device h100 --device rtx4090\n\n\
        Times are predicted from the devices' files.")]
    Fit(FitArgs),
    /// List the machines that --device knows, and the GPUs of this machine
    #[command(after_help = "Example:\n  lighterage devices\n\n\
        LIGHTERAGE_CUDA names the driver's library [default: libcuda.so.1].")]
    Devices(DevicesArgs),
    /// Prove a schedule: every read finds its value, every conflict is ordered, everything fits
    #[command(
        after_help = "Example:\n  lighterage plan gpt2.pt2 --budget 60% --dump-ir-after sync > \
            step.ir\n  \
        lighterage check step.ir"
    )]
    Check(CheckArgs),
    /// Estimate by formula what training needs on each device; this needs no model file
    #[command(after_help = "Examples:\n  lighterage estimate --params 7B\n  \
        lighterage estimate llama/config.json --dim sequence=4096 --dim batch=4\n  \
        lighterage estimate --params 7B --layers 32 --width 4096 --heads 32 --seq 2048 --batch \
        4 \\\n      \
        --recompute full --device a100-80g\n  \
        lighterage estimate --params 70B --tensor-parallel 8 --pipeline 4 --data-parallel 2 \
        --zero 1\n  \
        lighterage estimate --layers 4 --width 256 --heads 4 --seq 128 --batch 8 --vocab \
        256 \\\n      \
        --precision f32 --attention flash --no-dropout --update backward\n\n\
        docs/estimate.md has the formulas. With a model file, the estimate is exact.")]
    Estimate(EstimateArgs),
    /// Solve weight offloading for a chain of layers: which bytes of weights leave the device, and
    /// when
    #[command(
        after_help = "Example:\n  lighterage offload solve gpt2.json --memory 9GiB\n\n\
        docs/offload.md describes the file."
    )]
    Offload(OffloadArgs),
    /// Plan addresses for the memory blocks in a trace of any program
    #[command(after_help = "Examples:\n  lighterage alloc stats snapshot.pickle\n  \
        lighterage alloc plan snapshot.pickle -o plan.csv\n  \
        lighterage alloc generate --model qwen2.5-7b --pipeline 4 -o qwen.trace\n\n\
        docs/alloc.md describes the formats.")]
    Alloc(AllocArgs),
}

/// The most micro-batches of a step: each adds its own lines to the program.
pub(crate) const MOST_MICRO_BATCHES: u64 = 4096;

/// The number of micro-batches of a step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum MicroBatches {
    /// The divisor of the batch with the fastest step.
    Auto,
    /// A number of batches.
    Of(u64),
}

impl Command {
    /// The model that a command reads, and how a forward becomes a step.
    pub(crate) fn forward(&mut self) -> Option<(&Path, &mut ForwardArgs)> {
        Some(match self {
            Command::Import(args) => (&args.model.model, &mut args.forward),
            Command::Plan(args) => (&args.model.model, &mut args.compiling.forward),
            Command::Compile(args) => (&args.model.model, &mut args.compiling.forward),
            Command::Train(args) => (&args.model, &mut args.compiling.forward),
            Command::Explain(args) => (&args.model.model, &mut args.compiling.forward),
            Command::Profile(args) => (&args.model.model, &mut args.forward),
            Command::Fit(args) => (&args.model.model, &mut args.forward),
            Command::Estimate(args) => (args.model.as_ref()?, &mut args.forward),
            _ => return None,
        })
    }

    /// Whether a command that looks for a plan prints objects. They also say that none fits.
    pub(crate) fn prints_json(&self) -> bool {
        match self {
            Command::Plan(args) => args.json,
            Command::Compile(args) => args.json,
            Command::Train(args) => args.json,
            Command::Explain(args) => args.json,
            Command::Profile(args) => args.json,
            Command::Offload(args) => match &args.command {
                OffloadCommand::Solve(args) => args.json,
                OffloadCommand::Table1(_) | OffloadCommand::Figure4(_) => false,
            },
            _ => false,
        }
    }
}

/// A model.
#[derive(Args, Debug)]
pub(crate) struct ModelArgs {
    /// The model: a .pt2 file, an .onnx file, the config.json of a language model, or a graph as
    /// text (.ir)
    pub(crate) model: PathBuf,
    #[command(flatten)]
    pub(crate) reading: Reading,
}

/// How a model's file is read.
#[derive(Args, Clone, Default, Debug)]
pub(crate) struct Reading {
    /// A value for a symbolic size; may be given several times. Those of a config.json are sequence
    /// and batch [default: batch=1]
    #[arg(long, value_name = "NAME=SIZE", value_parser = parse_dim)]
    pub(crate) dim: Vec<(String, u64)>,
    /// The sequences of a config.json consist of documents that do not see each other: the model
    /// gets inputs position_ids and segment_ids. `train --pack` fills them, and implies this option
    #[arg(long)]
    pub(crate) packed: bool,
    /// Drop elements where a config.json asks for it, such as embd_pdrop, as transformers does
    /// while a model learns. Attention whose weights are dropped keeps its scores, which takes
    /// memory
    #[arg(long)]
    pub(crate) dropout: bool,
    /// Which initializers of an .onnx file are trained: those that were parameters of a module, all
    /// floating-point ones but single numbers, or those whose name matches, such as 'encoder.*' (a
    /// comma separates patterns) [default: named]
    #[arg(long, value_name = "named|all|PATTERN")]
    pub(crate) trainable: Option<String>,
    /// What a BatchNormalization of an .onnx file for inference does. train: it uses the statistics
    /// of each batch and updates the stored ones. frozen: it uses the stored ones. Such a file
    /// needs a choice
    #[arg(long, value_name = "train|frozen", value_parser = batch_norm())]
    pub(crate) batch_norm: Option<BatchNorm>,
}

/// Sizes of batches.
#[derive(Args, Clone, Default, Debug)]
pub(crate) struct BucketsArgs {
    /// A step for each of these values of a symbolic size, the largest first, on one memory and one
    /// set of states: the plan of the largest holds them all. `train` runs each batch in the
    /// smallest that holds it. NAME may be left out if only one symbolic size has no value
    #[arg(long, value_name = "[NAME=]SIZE,SIZE..", value_parser = parse_buckets)]
    pub(crate) buckets: Option<Buckets>,
}

/// The sizes of `--buckets`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Buckets {
    /// The symbolic size, if it is named.
    pub(crate) name: Option<String>,
    /// Its values, largest first.
    pub(crate) sizes: Vec<u64>,
}

fn parse_buckets(text: &str) -> Result<Buckets, String> {
    let (name, sizes) = match text.split_once('=') {
        Some((name, sizes)) => (Some(name.trim().to_string()), sizes),
        None => (None, text),
    };
    let sizes: Result<Vec<u64>, _> = sizes.split(',').map(|size| size.trim().parse()).collect();
    let mut sizes = sizes.unwrap_or_default();
    sizes.sort_unstable_by(|a, b| b.cmp(a));
    sizes.dedup();
    match sizes.is_empty() || sizes.contains(&0) || name.as_deref() == Some("") {
        true => Err(format!(
            "{text:?} are no sizes: write NAME=SIZE,SIZE, as in sequence=512,1024,2048"
        )),
        false => Ok(Buckets { name, sizes }),
    }
}

/// The heading of [`ForwardArgs`]. Each option has it, because options after them have others.
const FORWARD: &str = "Forward";

/// How a forward becomes a step.
#[derive(Args, Clone, Default, Debug)]
pub(crate) struct ForwardArgs {
    /// Add the backward to a model that is a forward alone, such as a file of torch.export
    #[arg(long, help_heading = FORWARD)]
    pub(crate) differentiate: bool,
    /// The loss. none: the model's own output with one element. The others compare an output with
    /// labels, and are PyTorch's means: cross-entropy over the last dimension (-100 is ignored),
    /// mse, bce (with logits), l1 [default: none]
    #[arg(long, requires = "differentiate", help_heading = FORWARD,
        value_parser = named(&Loss::ALL, Loss::name))]
    pub(crate) loss: Option<Loss>,
    /// The output that the loss reads; with --loss none, the output that is the loss [default:
    /// logits, or the only one that fits]
    #[arg(long, value_name = "OUTPUT", requires = "differentiate", help_heading = FORWARD)]
    pub(crate) logits: Option<String>,
    /// The name of the input for the labels, i64 for cross-entropy, else of the type of the logits
    /// [default: labels]
    #[arg(long, value_name = "INPUT", requires = "differentiate", help_heading = FORWARD)]
    pub(crate) labels: Option<String>,
    /// Add adapters (LoRA) to a forward and train them alone:
    /// r=16,alpha=32,dropout=0.05,targets=q_proj|v_proj, or the adapter_config.json of PEFT or its
    /// folder. targets are the last names of modules [defaults: r=8, alpha=r, dropout=0, all
    /// modules with a matrix but the head and routers of experts]
    #[arg(long, value_name = "r=N,alpha=X,dropout=P,targets=A|B or FILE", help_heading = FORWARD,
        value_parser = AddLora::parse)]
    pub(crate) add_lora: Option<AddLora>,
    /// Position i predicts the label of position i + 1: cross-entropy of causal language models
    #[arg(long, requires = "differentiate", help_heading = FORWARD)]
    pub(crate) shift: bool,
}

/// How to compile it. An option that was not given is `None`, so `train` knows which options were
/// given.
#[derive(Args, Clone, Default, Debug)]
#[command(next_help_heading = "Compiling")]
pub(crate) struct Compiling {
    /// Compile the loss alone, as in evaluation.
    #[arg(skip)]
    pub(crate) evaluate: bool,
    /// The optimizer to attach [default: none]
    #[arg(long, value_parser = optimizer())]
    pub(crate) optimizer: Option<Optimizer>,
    /// Keep f32 masters of parameters in half precision, which are updated instead. full: an f32
    /// beside each parameter, with every optimizer. split: 16 more bits beside each bf16 parameter,
    /// with adamw: 12 bytes per parameter including moments. With --precision bf16 or fp16, the
    /// parameters that a model in f32 reads in half precision are stored in it [default: none]
    #[arg(long, value_parser = master())]
    pub(crate) master: Option<Master>,
    /// How bf16 parameters without masters are rounded after an update in f32. stochastic: to one
    /// of the two neighbours at random, so that small updates count on average; moments are then
    /// f32, those of adamw-bf16 excepted [default: nearest]
    #[arg(long, value_parser = named(&Rounding::ALL, Rounding::name))]
    pub(crate) rounding: Option<Rounding>,
    /// Scale gradients down so that the norm over all of them is at most this, as
    /// torch.nn.utils.clip_grad_norm_ does
    #[arg(long, value_name = "NORM", allow_negative_numbers = true)]
    pub(crate) clip_norm: Option<f64>,
    /// Compute the norm over all gradients, before they are clipped; `train` prints it
    #[arg(long)]
    pub(crate) grad_norm: bool,
    /// Options of the parameters whose paths match, such as '*.bias|*.ln.*:weight-decay=0,lr=1e-4'.
    /// May be given several times; the last match wins
    #[arg(long, value_name = "PATTERN:OPTION=VALUE,..", value_parser = Group::parse)]
    pub(crate) group: Vec<Group>,
    /// No weight decay of biases and norms: of parameters with fewer than 2 dimensions
    #[arg(long)]
    pub(crate) no_decay: bool,
    /// Do not train the parameters whose paths match, such as 'embed.*'; may be given several times
    #[arg(long, value_name = "PATTERN", value_parser = Paths::parse)]
    pub(crate) freeze: Vec<Paths>,
    /// Accumulate gradients over N batches for one update, that of all their samples. auto: cut the
    /// batch, a symbolic size that --dim gives, into the number with the fastest step [default: 1]
    #[arg(long, value_name = "auto|N", value_parser = parse_micro_batches)]
    pub(crate) micro_batches: Option<MicroBatches>,
    /// The loss of all micro-batches. auto: that of one batch with all their samples, as the model
    /// defines it. mean, sum: of their losses [default: auto]
    #[arg(long, value_parser = named(&Combination::ALL, Combination::name))]
    pub(crate) reduction: Option<Combination>,
    /// Compute the loss in at most N chunks of rows, so that the full logits are never stored. 1:
    /// do not cut the loss. auto: cut it if that gives a better plan for the budget [default: auto]
    #[arg(long, value_name = "auto|N", value_parser = parse_chunks)]
    pub(crate) loss_chunks: Option<Chunks>,
    /// When updates run. backward: each parameter as soon as its gradient is complete. after: all
    /// parameters after the backward [default: backward]
    #[arg(long, value_parser = update())]
    pub(crate) update: Option<Update>,
    /// The machine to plan for: its name, or a .toml file that describes it. cuda or cuda:1 is a
    /// GPU of this machine, with the memory that is free; `train` then runs there [default: cpu]
    #[arg(long, value_name = "NAME|FILE.toml|cuda:N")]
    pub(crate) device: Option<String>,
    /// Limit of device memory for the whole step: 20GiB, 64MiB, a number of bytes, or 60% of what
    /// keeping everything needs [default: the device's memory]
    #[arg(long, value_name = "BYTES|PERCENT", value_parser = parse_budget)]
    pub(crate) budget: Option<Budget>,
    /// Limit of the host's memory [default: as in the device's file]
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes)]
    pub(crate) host: Option<u64>,
    /// The planner, which decides what is kept, swapped and recomputed [default: auto]
    #[arg(long, value_parser = planner())]
    pub(crate) planner: Option<Planner>,
    /// Give some of the numbers of the planner protrain, and search the others: n_persist and
    /// n_buffer of the chunks of parameters, n_swap and n_ckpt of the blocks. It implies --planner
    /// protrain
    #[arg(long, value_name = "n_persist=N,n_buffer=N,n_swap=N,n_ckpt=N",
        value_parser = Fixed::parse)]
    pub(crate) protrain: Option<Fixed>,
    /// The kernels. plain: one kernel for each op. generated: kernels for groups of ops [default:
    /// generated]
    #[arg(long, value_parser = named(&Kernels::ALL, Kernels::name))]
    pub(crate) kernels: Option<Kernels>,
    /// The types in which a step traced in f32 is computed. tf32: a GPU may round the factors of
    /// f32 products to 11 bits of precision, as torch.backends.cuda.matmul.allow_tf32 does. bf16,
    /// fp16: as torch.autocast does it, with parameters and moments in f32 (see --master); fp16
    /// scales the loss [default: f32]
    #[arg(long, value_parser = named(&Precision::ALL, Precision::name))]
    pub(crate) precision: Option<Precision>,
    /// How the scale of the loss in fp16 begins, grows after a number of updates, and falls after
    /// an overflow, as in torch.amp.GradScaler [default:
    /// init=65536,growth=2,backoff=0.5,interval=2000]
    #[arg(long, value_name = "init=N,growth=N,backoff=N,interval=N", requires = "precision",
        value_parser = LossScale::parse)]
    pub(crate) loss_scale: Option<LossScale>,
    /// How frozen matrices of products are stored. nf4: in 4 bits with double quantisation, as
    /// QLoRA stores them, 0.516 bytes for each number. For adapters: `lighterage train lora.pt2
    /// --base nf4 --optimizer adamw ...` [default: whole]
    #[arg(long, value_parser = named(&Base::ALL, Base::name))]
    pub(crate) base: Option<Base>,
    /// Bandwidth of the link between device and host in each direction, such as 2GB/s, instead of
    /// the one in the device's file. `train` also slows copies down to it
    #[arg(long, value_name = "RATE", value_parser = parse_rate)]
    pub(crate) link: Option<f64>,
    /// A folder on a disk, where a file of at most BYTES, such as 200GiB [default: 95 % of what is
    /// free], holds what is moved out. With --host, or for a GPU, the disk is behind the host's
    /// memory: three levels. Else it takes the place of the host's memory
    #[arg(long, value_name = "DIR[:BYTES]", value_parser = Disk::parse)]
    pub(crate) disk: Option<Disk>,
    /// The rate that reads and writes of the disk share, such as 2GB/s, instead of measuring it
    #[arg(long, value_name = "RATE", requires = "disk", value_parser = parse_rate)]
    pub(crate) disk_rate: Option<f64>,
    /// Use the times that `profile` measured, instead of times computed from the device's file
    #[arg(long, value_name = "FILE.prof")]
    pub(crate) profile: Option<PathBuf>,
    /// Skip a pass. Without simplify, formulas stay as they were traced
    #[arg(long, value_name = "PASS", value_parser = ["simplify"])]
    pub(crate) without: Option<String>,
    /// Print the program after this pass, or after each pass
    #[arg(long, value_name = "PASS|all", value_parser = PossibleValuesParser::new(dumps()))]
    pub(crate) dump_ir_after: Option<String>,
    /// Write the program to a file NN-PASS.ir in this folder after each pass that changed it
    #[arg(long, value_name = "DIR")]
    pub(crate) dump_dir: Option<PathBuf>,
    /// Print how long each pass took
    #[arg(long)]
    pub(crate) time_passes: bool,
    #[command(flatten)]
    pub(crate) forward: ForwardArgs,
}

impl Compiling {
    /// True if a GPU may round the factors of f32 products.
    pub(crate) fn is_tf32(&self) -> bool {
        self.precision == Some(Precision::Tf32)
    }
}

/// `import`.
#[derive(Args, Debug)]
pub(crate) struct ImportArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    #[command(flatten)]
    pub(crate) forward: ForwardArgs,
    /// Write to a file instead of standard output
    #[arg(short, long, value_name = "FILE")]
    pub(crate) output: Option<PathBuf>,
}

/// `plan`.
#[derive(Args, Debug)]
pub(crate) struct PlanArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    #[command(flatten)]
    pub(crate) buckets: BucketsArgs,
    #[command(flatten)]
    pub(crate) compiling: Compiling,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
    /// Print all useful budgets instead of a few rows
    #[arg(long, help_heading = "Report")]
    pub(crate) curve: bool,
    /// Draw step time against budget
    #[arg(long, value_name = "FILE.svg", help_heading = "Report")]
    pub(crate) curve_svg: Option<PathBuf>,
    /// Write a page for the browser: memory over time, streams, decisions with their reasons, and
    /// other budgets
    #[arg(long, value_name = "FILE.html", help_heading = "Report")]
    pub(crate) report: Option<PathBuf>,
    /// Write a table of the step's lines: when each runs, and the device's bytes before, during and
    /// after it
    #[arg(long, value_name = "FILE.csv", help_heading = "Report")]
    pub(crate) lines: Option<PathBuf>,
}

/// `compile`.
#[derive(Args, Debug)]
pub(crate) struct CompileArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    #[command(flatten)]
    pub(crate) buckets: BucketsArgs,
    #[command(flatten)]
    pub(crate) compiling: Compiling,
    /// The file to write
    #[arg(short, long, value_name = "FILE.lit", required_unless_present = "emit")]
    pub(crate) output: Option<PathBuf>,
    /// Write the text of the generated kernels instead of the artifact, to standard output unless a
    /// file is named
    #[arg(long, value_name = "FORM", value_parser = named(&Emit::ALL, Emit::name))]
    pub(crate) emit: Option<Emit>,
    /// What the kernels are for, `cpu` for this machine's processor [default: the GPU of --device,
    /// or cpu; for --emit ptx sm_90]
    #[arg(long, value_name = "TARGET", value_parser = target())]
    pub(crate) target: Option<CodeFor>,
    /// Print one JSON object: what was written, or, with --emit, the kernels with their nodes and
    /// text
    #[arg(long)]
    pub(crate) json: bool,
}

ir::named! {
    /// What `--emit` writes.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub(crate) enum Emit {
        /// MLIR, as emitted.
        Mlir = "mlir",
        /// LLVM's text, after its passes.
        Llvm = "llvm",
        /// The processor's assembly; PTX for a GPU.
        Asm = "asm",
        /// PTX, for a GPU.
        Ptx = "ptx",
    }
}

/// `train`.
#[derive(Args, Debug)]
pub(crate) struct TrainArgs {
    /// The step to run: a .lit file, or a model as for `compile`
    pub(crate) model: PathBuf,
    #[command(flatten)]
    pub(crate) reading: Reading,
    #[command(flatten)]
    pub(crate) buckets: BucketsArgs,
    #[command(flatten)]
    pub(crate) compiling: Compiling,
    #[command(flatten)]
    pub(crate) data: DataArgs,
    /// How many steps to run; with --resume, how many the run has with those before
    #[arg(long, value_name = "N", help_heading = "Training")]
    pub(crate) steps: u64,
    #[command(flatten)]
    pub(crate) hyper: HyperArgs,
    /// Initial values of the parameters. normal:STD draws them at random (gains become 1, biases
    /// 0). A file has a tensor for each path, or the names of a published file; so have a folder of
    /// Hugging Face's libraries and a checkpoint [default: the values in the model's file]
    #[arg(
        long,
        visible_alias = "weights",
        value_name = "normal:STD|FILE.safetensors|DIR",
        help_heading = "Training"
    )]
    pub(crate) init: Option<String>,
    /// Seed of --init normal and of the model's random numbers
    #[arg(long, default_value_t = 0, help_heading = "Training")]
    pub(crate) seed: u64,
    /// Write all states to a file at the end
    #[arg(long, value_name = "OUT.safetensors", help_heading = "Training")]
    pub(crate) save: Option<PathBuf>,
    /// Initial values of adapters, from a folder that PEFT or --save-adapters wrote; they replace
    /// those of the model's file or of --init
    #[arg(long, value_name = "DIR", help_heading = "Training")]
    pub(crate) adapters: Option<PathBuf>,
    /// Write the adapters alone to a folder at the end, as PEFT does. The folder has the
    /// adapter_config.json that save_pretrained writes
    #[arg(long, value_name = "DIR", help_heading = "Training")]
    pub(crate) save_adapters: Option<PathBuf>,
    /// Let --save replace a file, and write checkpoints, even if parameters or moments are NaN or
    /// infinite
    #[arg(long, help_heading = "Training")]
    pub(crate) save_nonfinite: bool,
    /// Run the machine code of a .lit file that was not compiled here. It can do everything that a
    /// program can do
    #[arg(long)]
    pub(crate) trust: bool,
    /// Refuse a .lit file or a plan whose pools take more memory than this
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes, help_heading = "Training")]
    pub(crate) most_memory: Option<u64>,
    /// Write a trace of all lines, for ui.perfetto.dev
    #[arg(long, value_name = "OUT.json", help_heading = "Training")]
    pub(crate) trace: Option<PathBuf>,
    /// For tests: run streams in a random order that the schedule permits, and fill dead bytes with
    /// NaN
    #[arg(long, value_name = "SEED", help_heading = "Training")]
    pub(crate) shuffle: Option<u64>,
    /// Threads per kernel; results do not depend on it [default: the number of cores]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024),
        help_heading = "Training")]
    pub(crate) threads: Option<u16>,
    #[command(flatten)]
    pub(crate) checkpoints: CheckpointArgs,
    #[command(flatten)]
    pub(crate) eval: EvalArgs,
    #[command(flatten)]
    pub(crate) metrics: MetricsArgs,
    /// Print one JSON object per step, and a summary
    #[arg(long)]
    pub(crate) json: bool,
}

/// `export`.
#[derive(Args, Debug)]
pub(crate) struct ExportArgs {
    /// The .onnx file that was trained
    #[arg(value_name = "MODEL.onnx")]
    pub(crate) model: PathBuf,
    /// The states that `train --save` wrote
    #[arg(long, value_name = "TRAINED.safetensors")]
    pub(crate) states: PathBuf,
    /// The file to write
    #[arg(short, long, value_name = "OUT.onnx")]
    pub(crate) output: PathBuf,
}

/// `inspect`.
#[derive(Args, Debug)]
pub(crate) struct InspectArgs {
    /// The file
    #[arg(value_name = "FILE.lit")]
    pub(crate) file: PathBuf,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

ir::named! {
    /// How the learning rate changes after the warm-up.
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    pub(crate) enum Schedule {
        /// It stays.
        #[default]
        Constant = "constant",
        /// `LinearLR` from 1 to `--min-lr`.
        Linear = "linear",
        /// `CosineAnnealingLR` to `--min-lr`.
        Cosine = "cosine",
        /// `OneCycleLR` with its defaults, and without cycles of momentum.
        OneCycle = "one-cycle",
    }
}

/// The optimizer's options. The defaults are those of `Optimizer::options`.
#[derive(Args, Debug, Default)]
#[command(next_help_heading = "Training")]
pub(crate) struct HyperArgs {
    /// Learning rate [default: the optimizer's, 1e-3 for adamw; docs/optimizers.md has all
    /// defaults]
    #[arg(long, allow_negative_numbers = true)]
    pub(crate) lr: Option<f64>,
    /// Betas of adamw, lion and muon [default: the optimizer's, 0.9,0.999 for adamw]
    #[arg(long, value_name = "B1,B2", value_parser = parse_betas)]
    pub(crate) betas: Option<(f64, f64)>,
    /// AdamW's epsilon [default: 1e-8]
    #[arg(long, allow_negative_numbers = true)]
    pub(crate) eps: Option<f64>,
    /// Weight decay [default: the optimizer's, 0.01 for adamw]
    #[arg(long, allow_negative_numbers = true)]
    pub(crate) weight_decay: Option<f64>,
    /// Momentum of sgd and muon [default: 0 for sgd, 0.9 for sgd-momentum, 0.95 for muon]
    #[arg(long, allow_negative_numbers = true)]
    pub(crate) momentum: Option<f64>,
    /// Another option of the optimizer, such as d=1.5 of adafactor; may be given several times
    #[arg(long, value_name = "NAME=VALUE", value_parser = parse_option)]
    pub(crate) option: Vec<(String, f64)>,
    /// How the learning rate changes from step to step, by PyTorch's formulas: LinearLR to
    /// --min-lr, CosineAnnealingLR to --min-lr, OneCycleLR with --lr as its highest rate [default:
    /// constant]
    #[arg(long, value_parser = named(&Schedule::ALL, Schedule::name))]
    pub(crate) schedule: Option<Schedule>,
    /// In the first N steps the rate rises to --lr: step i of them has (i + 1)/(N + 1) of it
    #[arg(long, value_name = "N")]
    pub(crate) warmup: Option<u64>,
    /// The rate at the end of the schedule [default: 0]
    #[arg(long, value_name = "RATE", allow_negative_numbers = true)]
    pub(crate) min_lr: Option<f64>,
    /// The number of steps that the schedule is for, with its warm-up [default: --steps]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) schedule_steps: Option<u64>,
}

/// `explain`.
#[derive(Args, Debug)]
pub(crate) struct ExplainArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    /// The tensor: a value's name, with or without %, a parameter's path, a module's path, or a
    /// buffer's name
    #[arg(value_name = "VALUE")]
    pub(crate) value: String,
    #[command(flatten)]
    pub(crate) compiling: Compiling,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

/// `profile`.
#[derive(Args, Debug)]
pub(crate) struct ProfileArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    #[command(flatten)]
    pub(crate) forward: ForwardArgs,
    /// The optimizer whose updates are measured too [default: adamw]
    #[arg(long, value_parser = optimizer())]
    pub(crate) optimizer: Option<Optimizer>,
    /// When updates run, as for `plan` [default: backward]
    #[arg(long, value_parser = update())]
    pub(crate) update: Option<Update>,
    /// The types in which the step is computed, as for `plan`; not tf32 [default: f32]
    #[arg(long, value_parser = named(&Precision::ALL, Precision::name))]
    pub(crate) precision: Option<Precision>,
    /// Masters of parameters in half precision, as for `plan` [default: none]
    #[arg(long, value_parser = master())]
    pub(crate) master: Option<Master>,
    /// The device that the profile describes: its name, or a .toml file. cuda:0 is a GPU of this
    /// machine, which is then measured instead of the processor [default: cpu]
    #[arg(long, value_name = "NAME|FILE.toml|cuda:N")]
    pub(crate) device: Option<String>,
    /// The kernels, as for `plan`. Each generated kernel is measured, and also its ops separately
    /// [default: generated]
    #[arg(long, value_parser = named(&Kernels::ALL, Kernels::name))]
    pub(crate) kernels: Option<Kernels>,
    /// Slow copies between device and host down to this bandwidth, in each direction: 2GB/s
    #[arg(long, value_name = "RATE", value_parser = parse_rate)]
    pub(crate) link: Option<f64>,
    /// How often to run each op. Of equal ops, one is run [default: 2 to 4 times, so that all takes
    /// about as long as four steps and two seconds]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub(crate) repeat: Option<u32>,
    /// A profile of this machine, whose ops and figures of the machine are taken over and not
    /// measured again. The file that is written has all of its ops, too
    #[arg(long, value_name = "FILE.prof")]
    pub(crate) reuse: Option<PathBuf>,
    /// Use the times of the fastest round instead of medians over rounds. This is for a machine
    /// with other load
    #[arg(long)]
    pub(crate) fastest: bool,
    /// Memory limit for the measured ops. Operands that do not fit are filled with new numbers when
    /// they are read. The largest op always gets the memory that it needs [default: 256MiB]
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes)]
    pub(crate) memory: Option<u64>,
    /// The file to write
    #[arg(short, long, value_name = "FILE.prof")]
    pub(crate) output: PathBuf,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

/// `fit`.
#[derive(Args, Debug)]
pub(crate) struct FitArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    #[command(flatten)]
    pub(crate) forward: ForwardArgs,
    /// The optimizer to attach [default: adamw]
    #[arg(long, value_parser = optimizer())]
    pub(crate) optimizer: Option<Optimizer>,
    /// The types in which a step traced in f32 is computed, as for `plan` [default: f32]
    #[arg(long, value_parser = named(&Precision::ALL, Precision::name))]
    pub(crate) precision: Option<Precision>,
    /// Masters of parameters in half precision, as for `plan` [default: none]
    #[arg(long, value_parser = master())]
    pub(crate) master: Option<Master>,
    /// Batches of a step, as for `plan` [default: 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64)
        .range(1..=MOST_MICRO_BATCHES))]
    pub(crate) micro_batches: Option<u64>,
    /// Limit of the host's memory [default: as in each device's file]
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes)]
    pub(crate) host: Option<u64>,
    /// A machine: its name, or a .toml file; may be given several times [default: all that
    /// `devices` lists]
    #[arg(long, value_name = "NAME|FILE.toml")]
    pub(crate) device: Vec<String>,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

/// `devices`.
#[derive(Args, Debug)]
pub(crate) struct DevicesArgs {
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

/// `check`.
#[derive(Args, Debug)]
pub(crate) struct CheckArgs {
    /// A program as text: a graph and its schedule, as dumped after `sync`
    pub(crate) schedule: PathBuf,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

/// `estimate`.
#[derive(Args, Debug)]
pub(crate) struct EstimateArgs {
    /// A model, as for `plan`: then its graph says all sizes, and the estimate is the plan that
    /// keeps everything
    #[arg(conflicts_with_all = ["params", "layers", "width", "heads", "seq", "batch", "vocab",
        "lora", "qlora", "foreach", "attention", "no_dropout", "tensor_parallel", "pipeline",
        "data_parallel", "zero", "micro_batches"])]
    pub(crate) model: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) reading: Reading,
    #[command(flatten)]
    pub(crate) forward: ForwardArgs,
    /// Parameters of the whole model: 7B, 350M, 124439808 [default: those of a GPT of the given
    /// shape]
    #[arg(long, value_name = "COUNT", value_parser = parse_count)]
    pub(crate) params: Option<u64>,
    /// The optimizer
    #[arg(long, default_value = "adamw", value_parser =
        named(&estimate::Optimizer::ALL, estimate::Optimizer::name))]
    pub(crate) optimizer: estimate::Optimizer,
    /// f32, bf16, or bf16 with weights and optimizer in f32
    #[arg(long, default_value = "mixed", value_parser =
        named(&estimate::Precision::ALL, estimate::Precision::name))]
    pub(crate) precision: estimate::Precision,
    /// Layers of the whole model. If width, heads and seq are also given, activations are counted
    #[arg(long, value_name = "L", help_heading = "Shape")]
    pub(crate) layers: Option<u64>,
    /// Hidden size
    #[arg(long, value_name = "D", help_heading = "Shape")]
    pub(crate) width: Option<u64>,
    /// Attention heads
    #[arg(long, value_name = "A", help_heading = "Shape")]
    pub(crate) heads: Option<u64>,
    /// Tokens of a sequence
    #[arg(long, value_name = "S", help_heading = "Shape")]
    pub(crate) seq: Option<u64>,
    /// Sequences per micro-batch on one device
    #[arg(long, value_name = "B", default_value_t = 1, help_heading = "Shape")]
    pub(crate) batch: u64,
    /// Size of the vocabulary. It adds the logits, and the embeddings if --params is absent
    #[arg(long, value_name = "V", help_heading = "Shape")]
    pub(crate) vocab: Option<u64>,
    /// What the backward recomputes. selective: attention's scores. full: everything except each
    /// layer's input
    #[arg(long, default_value = "none", value_parser =
        named(&estimate::Recompute::ALL, estimate::Recompute::name))]
    pub(crate) recompute: estimate::Recompute,
    /// What attention saves for the backward. flash: one number for each row of the scores
    #[arg(long, default_value = "scores", value_parser =
        named(&estimate::Attention::ALL, estimate::Attention::name))]
    pub(crate) attention: estimate::Attention,
    /// The model has no dropout, so that no masks are saved
    #[arg(long)]
    pub(crate) no_dropout: bool,
    /// AdamW updates all parameters at once, as PyTorch's default does: two temporary tensors for
    /// each parameter
    #[arg(long)]
    pub(crate) foreach: bool,
    /// When updates run: also estimate the peak of a step, as `plan` computes it. This needs a
    /// shape with --vocab, and one device
    #[arg(long, value_parser =
        named(&estimate::peak::Update::ALL, estimate::peak::Update::name))]
    pub(crate) update: Option<estimate::peak::Update>,
    /// Train adapters with this percentage of the parameters, and freeze the weights
    #[arg(long, value_name = "PERCENT", help_heading = "Adapters")]
    pub(crate) lora: Option<f64>,
    /// Train adapters with this percentage of the parameters, and freeze the weights in four bits
    #[arg(
        long,
        value_name = "PERCENT",
        conflicts_with = "lora",
        help_heading = "Adapters"
    )]
    pub(crate) qlora: Option<f64>,
    /// Devices that share each layer
    #[arg(
        long,
        value_name = "T",
        default_value_t = 1,
        help_heading = "Parallelism"
    )]
    pub(crate) tensor_parallel: u64,
    /// Pipeline stages; each device has a part of the layers
    #[arg(
        long,
        value_name = "P",
        default_value_t = 1,
        help_heading = "Parallelism"
    )]
    pub(crate) pipeline: u64,
    /// Micro-batches per step; a stage holds the activations of at most one micro-batch per stage
    /// [default: the number of stages]
    #[arg(long, value_name = "M", help_heading = "Parallelism")]
    pub(crate) micro_batches: Option<u64>,
    /// Replicas of the model
    #[arg(
        long,
        value_name = "N",
        default_value_t = 1,
        help_heading = "Parallelism"
    )]
    pub(crate) data_parallel: u64,
    /// What replicas shard. 1: the optimizer's states. 2: also gradients. 3: also weights
    #[arg(long, value_name = "STAGE", default_value_t = 0,
        value_parser = clap::value_parser!(u8).range(0..=3),
          help_heading = "Parallelism")]
    pub(crate) zero: u8,
    /// Devices to compare with: names or .toml files [default: all known devices]
    #[arg(long, value_name = "NAME|FILE.toml", num_args = 1..)]
    pub(crate) device: Vec<String>,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

/// `offload`.
#[derive(Args, Debug)]
pub(crate) struct OffloadArgs {
    /// What to do with a problem.
    #[command(subcommand)]
    pub(crate) command: OffloadCommand,
}

/// A subcommand of `offload`.
#[derive(Subcommand, Debug)]
pub(crate) enum OffloadCommand {
    /// Schedule a step's transfers, check the schedule, and report its gap to the lower bound
    #[command(
        after_help = "Example:\n  lighterage offload solve gpt2.json --memory 9GiB\n\n\
        INSTANCE.json has link_bytes_per_second, memory_bytes and layers; a layer has \
        weight_bytes, activation_bytes,\n\
        forward_micros, backward_micros and, if there are several like it, count."
    )]
    Solve(OffloadSolveArgs),
    /// Print Table 1 of the paper: steps in ms on 15 chains, theirs beside ours
    #[command(after_help = "Example:\n  lighterage offload table1 --blocks 6")]
    Table1(OffloadTable1Args),
    /// Print Figure 4 of the paper: the overhead of a step in percent at six bandwidths
    #[command(after_help = "Example:\n  lighterage offload figure4")]
    Figure4(OffloadFigure4Args),
}

/// `offload table1`.
#[derive(Args, Debug)]
pub(crate) struct OffloadTable1Args {
    /// Memory beyond the least that any schedule fits, in blocks' weights. The paper does not state
    /// its memory
    #[arg(long, value_name = "N", default_value_t = 6.0, value_parser = parse_blocks)]
    pub(crate) blocks: f64,
    /// Print one JSON array with an object for each row
    #[arg(long)]
    pub(crate) json: bool,
}

/// `offload figure4`.
#[derive(Args, Debug)]
pub(crate) struct OffloadFigure4Args {
    /// Print one JSON array with an object for each row
    #[arg(long)]
    pub(crate) json: bool,
}

/// `offload solve`.
#[derive(Args, Debug)]
pub(crate) struct OffloadSolveArgs {
    /// The problem
    #[arg(value_name = "INSTANCE.json")]
    pub(crate) instance: PathBuf,
    /// The algorithm; bound computes only the lower bound
    #[arg(long, value_name = "NAME", default_value = "greedy+", value_parser = offload_algorithm())]
    pub(crate) algorithm: OffloadAlgorithm,
    /// Memory of the device, instead of the value in the file
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes)]
    pub(crate) memory: Option<u64>,
    /// Print one JSON object, with the whole schedule
    #[arg(long)]
    pub(crate) json: bool,
}

/// `alloc`.
#[derive(Args, Debug)]
pub(crate) struct AllocArgs {
    /// What to do with a trace.
    #[command(subcommand)]
    pub(crate) command: AllocCommand,
}

/// A subcommand of `alloc`.
#[derive(Subcommand, Debug)]
pub(crate) enum AllocCommand {
    /// Give every block of a trace an address, check the plan, and report the peak's gap to the
    /// lower bound
    #[command(
        after_help = "Examples:\n  lighterage alloc plan snapshot.pickle -o plan.csv --svg \
            plan.svg\n  \
        lighterage alloc plan A.1048576.csv --capacity 1048576 --align 1 --effort max\n\n\
        docs/alloc.md describes the formats."
    )]
    Plan(AllocPlanArgs),
    /// Check a plan: overlaps, bounds, alignment, every block placed once
    #[command(after_help = "Example:\n  lighterage alloc check snapshot.pickle plan.csv")]
    Check(AllocCheckArgs),
    /// Describe a trace, and simulate what a caching allocator would reserve for it
    #[command(after_help = "Example:\n  lighterage alloc stats snapshot.pickle")]
    Stats(AllocStatsArgs),
    /// Write a trace of any format as events: one line for each request
    #[command(
        after_help = "Example:\n  lighterage alloc convert snapshot.pickle -o snapshot.trace"
    )]
    Convert(AllocConvertArgs),
    /// Write the requests that a rank of a training run would make, without a GPU: a Megatron-LM
    /// run of a known model, as in the STAlloc paper
    #[command(
        after_help = "Examples:\n  lighterage alloc generate --model llama2-7b --pipeline 4 \
        --tensor-parallel 2 \\\n      --sequence-parallel --micro-batch 4 --recompute -o \
        llama.trace\n  \
        lighterage alloc plan llama.trace\n\n\
        docs/alloc.md says what is generated."
    )]
    Generate(AllocGenerateArgs),
}

/// A trace.
#[derive(Args, Debug)]
pub(crate) struct TraceArgs {
    /// The requests of a program: a table like minimalloc's, a PyTorch memory snapshot, lines of
    /// START END SIZE, a log of STAlloc, or events as in docs/alloc.md
    #[arg(value_name = "TRACE")]
    pub(crate) trace: PathBuf,
    /// The format of the trace [default: detected from its content]
    #[arg(long, value_name = "NAME", value_parser = named(&Format::ALL, Format::name))]
    pub(crate) format: Option<Format>,
}

ir::named! {
    /// The planner of addresses.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub(crate) enum AddressPlanner {
        Ours = "ours",
        Stalloc = "stalloc",
    }
}

/// `alloc plan`.
#[derive(Args, Debug)]
pub(crate) struct AllocPlanArgs {
    #[command(flatten)]
    pub(crate) trace: TraceArgs,
    /// The size of each pool; the first plan that fits is taken
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes)]
    pub(crate) capacity: Option<u64>,
    /// Addresses are multiples of this, a power of two
    #[arg(long, value_name = "BYTES", default_value = "512", value_parser = parse_align)]
    pub(crate) align: u64,
    /// How long to search for a better plan
    #[arg(long, value_name = "NAME", default_value = "normal", value_parser = effort())]
    pub(crate) effort: Effort,
    /// The planner. stalloc is the planner of the STAlloc paper, for comparison
    #[arg(long, value_name = "NAME", default_value = "ours",
        value_parser = named(&AddressPlanner::ALL, AddressPlanner::name))]
    pub(crate) planner: AddressPlanner,
    /// Threads that search [default: the number of cores]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub(crate) threads: Option<u16>,
    /// Methods to switch off, to see what each contributes
    #[arg(long, value_name = "NAMES", value_delimiter = ',',
        value_parser = named(&Method::ALL, Method::name))]
    pub(crate) without: Vec<Method>,
    /// Let streams share bytes without a wait. The program that uses the plan must make streams
    /// wait, as the run-time allocator does
    #[arg(long)]
    pub(crate) share_streams: bool,
    /// Write the plan: the trace's blocks as a table with offsets
    #[arg(short, long, value_name = "PLAN.csv")]
    pub(crate) output: Option<PathBuf>,
    /// Write a plan file for the run-time allocator. It plans the step that the trace repeats. The
    /// trace must have one pool
    #[arg(long, value_name = "STEP.plan", conflicts_with = "planner")]
    pub(crate) serve: Option<PathBuf>,
    /// Draw the plan: time from left to right, addresses from bottom to top
    #[arg(long, value_name = "PLAN.svg")]
    pub(crate) svg: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

/// `alloc check`.
#[derive(Args, Debug)]
pub(crate) struct AllocCheckArgs {
    #[command(flatten)]
    pub(crate) trace: TraceArgs,
    /// The plan
    #[arg(value_name = "PLAN.csv")]
    pub(crate) plan: PathBuf,
    /// The size of each pool [default: no limit]
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes)]
    pub(crate) capacity: Option<u64>,
    /// Accept that streams share bytes without a wait
    #[arg(long)]
    pub(crate) share_streams: bool,
    /// Addresses must be multiples of this, in addition to the trace's own alignments
    #[arg(long, value_name = "BYTES", default_value = "1", value_parser = parse_align)]
    pub(crate) align: u64,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

/// `alloc stats`.
#[derive(Args, Debug)]
pub(crate) struct AllocStatsArgs {
    #[command(flatten)]
    pub(crate) trace: TraceArgs,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

/// `alloc convert`.
#[derive(Args, Debug)]
pub(crate) struct AllocConvertArgs {
    #[command(flatten)]
    pub(crate) trace: TraceArgs,
    /// Write to a file instead of standard output
    #[arg(short, long, value_name = "FILE")]
    pub(crate) output: Option<PathBuf>,
}

/// `alloc generate`.
#[derive(Args, Debug)]
pub(crate) struct AllocGenerateArgs {
    /// The model
    #[arg(long, value_name = "NAME", value_parser = named(&Model::ALL, Model::name))]
    pub(crate) model: Model,
    /// Tokens of a sequence [default: the model's]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) sequence: Option<u64>,
    /// Sequences of a micro-batch
    #[arg(long, value_name = "N", default_value_t = 1,
        value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) micro_batch: u64,
    /// Micro-batches of a step
    #[arg(long, value_name = "N", default_value_t = 8,
        value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) micro_batches: u32,
    /// Stages of the pipeline (1F1B)
    #[arg(long, value_name = "N", default_value_t = 1,
        value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) pipeline: u16,
    /// The stage of the rank, from 0
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) stage: u16,
    /// Parts of the model on each rank: a virtual pipeline
    #[arg(long, value_name = "N", default_value_t = 1,
        value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) virtual_pipeline: u16,
    /// Ranks over which each product is divided
    #[arg(long, value_name = "N", default_value_t = 1,
        value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) tensor_parallel: u16,
    /// Divide the tensors between the products over these ranks too
    #[arg(long)]
    pub(crate) sequence_parallel: bool,
    /// Ranks over which the experts of a layer are divided
    #[arg(long, value_name = "N", default_value_t = 1,
        value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) expert_parallel: u16,
    /// Divide the optimizer's states over this many ranks
    #[arg(long, value_name = "RANKS", default_value_t = 1,
        value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) zero: u16,
    /// Keep only the inputs of layers, and run layers again in the backward
    #[arg(long)]
    pub(crate) recompute: bool,
    /// Keep activations and the optimizer's states on the host
    #[arg(long)]
    pub(crate) offload: bool,
    /// Steps. With more than 1, the optimizer's moments are requested at the end of the first one
    #[arg(long, value_name = "N", default_value_t = 1,
        value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) steps: u16,
    /// Micro-batches of an evaluation after each step
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) evaluate: u16,
    /// Make the sequences of a micro-batch up to this many percent shorter
    #[arg(long, value_name = "PERCENT", default_value_t = 0,
        value_parser = clap::value_parser!(u64).range(0..=90))]
    pub(crate) vary: u64,
    /// Hold the tensors of collectives after they are freed, as PyTorch's allocator does until the
    /// device has done the work. For allocators that are simulated; a plan needs no such trace
    #[arg(long)]
    pub(crate) hold_collectives: bool,
    /// The seed of lengths and of the routing to experts
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) seed: u64,
    /// Write to a file instead of standard output
    #[arg(short, long, value_name = "FILE")]
    pub(crate) output: Option<PathBuf>,
    /// Print one JSON object about the trace
    #[arg(long, requires = "output")]
    pub(crate) json: bool,
}

/// What `offload solve` computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OffloadAlgorithm {
    /// A schedule.
    Solve(Algorithm),
    /// Only the lower bound.
    Bound,
}

/// Names of `--dump-ir-after`.
pub(crate) fn dumps() -> Vec<&'static str> {
    ["import"]
        .into_iter()
        .chain(pipeline::names())
        .chain(["all"])
        .collect()
}

fn optimizer() -> impl TypedValueParser<Value = Optimizer> {
    named(&Optimizer::ALL, Optimizer::name)
}

fn batch_norm() -> impl TypedValueParser<Value = BatchNorm> {
    named(&BatchNorm::ALL, BatchNorm::name)
}

fn master() -> impl TypedValueParser<Value = Master> {
    named(&Master::ALL, Master::name)
}

fn planner() -> impl TypedValueParser<Value = Planner> {
    named(&Planner::ALL, Planner::name)
}

fn offload_algorithm() -> impl TypedValueParser<Value = OffloadAlgorithm> {
    const ALL: [OffloadAlgorithm; Algorithm::ALL.len() + 1] = {
        let mut all = [OffloadAlgorithm::Bound; Algorithm::ALL.len() + 1];
        let mut k = 0;
        while k < Algorithm::ALL.len() {
            all[k] = OffloadAlgorithm::Solve(Algorithm::ALL[k]);
            k += 1;
        }
        all
    };
    named(&ALL, |algorithm| match algorithm {
        OffloadAlgorithm::Solve(algorithm) => algorithm.name(),
        OffloadAlgorithm::Bound => "bound",
    })
}

/// Blocks of weights, at most a model's.
fn parse_blocks(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(blocks) if (0.0..=1000.0).contains(&blocks) => Ok(blocks),
        _ => Err("should be a number from 0 to 1000".into()),
    }
}

fn effort() -> impl TypedValueParser<Value = Effort> {
    named(
        &[Effort::Fast, Effort::Brief, Effort::Normal, Effort::Max],
        |effort| match effort {
            Effort::Fast => "fast",
            Effort::Brief => "brief",
            Effort::Normal => "normal",
            Effort::Max => "max",
        },
    )
}

fn update() -> impl TypedValueParser<Value = Update> {
    named(&[Update::Backward, Update::After], update_name)
}

/// One of `all`, by name.
fn named<T: Copy + Send + Sync + 'static>(
    all: &'static [T],
    name: fn(T) -> &'static str,
) -> impl TypedValueParser<Value = T> {
    let names = PossibleValuesParser::new(all.iter().map(|&value| name(value)));
    names.map(move |text| {
        let known = all.iter().copied().find(|&value| name(value) == text);
        known.expect("a name that the parser accepts should be one of its names")
    })
}

/// What kernels are compiled for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum CodeFor {
    /// The processor of this machine.
    ThisCpu,
    /// A machine by its name.
    Named(Target),
}

fn target() -> impl TypedValueParser<Value = CodeFor> {
    let targets = Target::ALL.iter().map(|target| target.name());
    let names = PossibleValuesParser::new(["cpu"].into_iter().chain(targets));
    names.map(|text| {
        let named = Target::ALL.into_iter().find(|target| target.name() == text);
        named.map_or(CodeFor::ThisCpu, CodeFor::Named)
    })
}

/// The largest alignment. With it, sums over any number of blocks fit into 64 bits.
const MOST_ALIGN: u64 = 1 << 30;

fn parse_align(text: &str) -> Result<u64, String> {
    match parse_bytes(text).map_err(|e| e.to_string())? {
        align if align.is_power_of_two() && align <= MOST_ALIGN => Ok(align),
        align => Err(format!("{align} is not a power of two up to {MOST_ALIGN}")),
    }
}

/// The most chunks: `cat` takes at most this number of operands.
const MOST_CHUNKS: u64 = 4096;

fn parse_chunks(text: &str) -> Result<Chunks, String> {
    match (text.trim(), text.trim().parse()) {
        ("auto", _) => Ok(Chunks::Auto),
        (_, Ok(n @ 1..=MOST_CHUNKS)) => Ok(Chunks::Of(n)),
        _ => Err(format!(
            "{text:?} is neither auto nor a number from 1 to {MOST_CHUNKS}"
        )),
    }
}

fn parse_micro_batches(text: &str) -> Result<MicroBatches, String> {
    match (text.trim(), text.trim().parse()) {
        ("auto", _) => Ok(MicroBatches::Auto),
        (_, Ok(n @ 1..=MOST_MICRO_BATCHES)) => Ok(MicroBatches::Of(n)),
        _ => Err(format!(
            "{text:?} is neither auto nor a number from 1 to {MOST_MICRO_BATCHES}"
        )),
    }
}

fn parse_option(text: &str) -> Result<(String, f64), String> {
    let bad = || format!("{text:?}: write NAME=VALUE, such as d=1.5");
    let (name, value) = text.split_once('=').ok_or_else(bad)?;
    let value: f64 = value.trim().parse().map_err(|_| bad())?;
    match value.is_finite() {
        true => Ok((name.trim().replace('-', "_"), value)),
        false => Err(bad()),
    }
}

fn parse_betas(text: &str) -> Result<(f64, f64), String> {
    let bad = || format!("{text:?} is not a pair: write 0.9,0.999");
    let (a, b) = text.split_once(',').ok_or_else(bad)?;
    Ok((
        a.trim().parse().map_err(|_| bad())?,
        b.trim().parse().map_err(|_| bad())?,
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }
}
