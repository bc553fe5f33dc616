//! Instructions to MLIR text: the loops over rows and columns, loads and stores.
//!
//! A row is gone through in passes: see `passes`. On a CPU a pass is a loop over vectors of 16
//! elements and one over those that are left; on a GPU a block of threads shares the row, with
//! vectors of 16 bytes. Values that do not vary along a row are scalars, computed outside of the
//! loops.

use super::dag::{Dag, Exponentials, Fold, Functions, Id, Prim};
use super::lower::{Known, storage};
use super::passes::{Buffer, Pass, Passes, kept_passes};
use crate::mlir::{Arith, Kind};
use ir::TensorType;
use ir::body::{Axes, Space};
use std::collections::BTreeMap;
use std::fmt::Write;

/// Elements that a CPU computes at a time.
const LANES: u64 = 16;
/// Elements of a part, about: enough that starting a part costs nothing.
const PART: u64 = 16384;
/// A result of so many bytes is not in any cache when it is read next: storing past the caches
/// saves reading it in first.
const STREAMED: u64 = 32 << 20;
/// The most bytes of a row that is fetched into the first cache, and into the second, while the row
/// before it is computed.
const FETCHED: [u64; 2] = [16 << 10, 256 << 10];
/// Columns of a block of a long row; it is gone through twice and should not leave the first cache
/// in between.
const BLOCK: u64 = 1024;
/// A number of each block: its largest element, later what its exponentials are to be multiplied
/// with; their sum.
const BLOCK_SCALES: &str = "%block_scales";
const BLOCK_SUMS: &str = "%block_sums";
/// So many blocks ahead are fetched.
const AHEAD: u64 = 2;
/// Columns of a part of a combining phase.
const COMBINED: u64 = 1024;

/// What a kernel is made from.
pub(super) struct Plan<'a> {
    pub(super) symbol: &'a str,
    pub(super) dag: &'a Dag,
    pub(super) space: &'a Space,
    pub(super) operands: &'a [TensorType],
    pub(super) results: &'a [Out],
    pub(super) gpu: bool,
}

impl Plan<'_> {
    /// True if a result is stored past the caches: it is large, and its rows begin where a vector
    /// of it may lie.
    pub(super) fn streams(&self, j: usize) -> bool {
        let out = &self.results[j];
        let aligned = || {
            self.space
                .strides(self.space.axes(out.value))
                .iter()
                .all(|s| s.is_multiple_of(LANES))
        };
        !self.gpu && STREAMED <= out.ty.bytes() && aligned()
    }
}

/// A result.
pub(super) struct Out {
    /// Which value of the body it is.
    pub(super) value: usize,
    pub(super) ty: TensorType,
    pub(super) known: Known,
}

/// A function of a kernel.
pub(super) struct Function {
    pub(super) symbol: String,
    pub(super) parts: u64,
    pub(super) threads: u32,
}

/// The text of a kernel.
pub(super) struct Text {
    pub(super) mlir: String,
    pub(super) functions: Vec<Function>,
    pub(super) scratch_bytes: u64,
}

/// Sums over rows of one result.
struct Sums {
    kind: Kind,
    /// Where its partial sums are in the scratch.
    offset: u64,
}

pub(super) fn emit(plan: &Plan<'_>) -> Result<Text, String> {
    let passes = kept_passes(plan);
    let sums: Vec<usize> = (0..plan.results.len())
        .filter(|&j| is_sum(&plan.results[j]))
        .collect();
    let (mut scratch_bytes, mut layout) = (0, BTreeMap::new());
    let (rows_each, sum_parts) = plan.space.parts();
    for &j in &sums {
        let Known::Columns { of, .. } = plan.results[j].known else {
            continue;
        };
        let kind = plan.dag.kind(of);
        layout.insert(
            j,
            Sums {
                kind,
                offset: scratch_bytes,
            },
        );
        scratch_bytes += plan.space.partial_bytes(plan.results[j].value);
    }
    let mut module = String::from("module {\n");
    let mut functions = vec![];
    let mut emitter = Emitter::new(plan, &passes, &layout, scratch_bytes);
    functions.push(emitter.main(rows_each, sum_parts)?);
    module.push_str(&emitter.finish());
    if !sums.is_empty() {
        let mut emitter = Emitter::new(plan, &passes, &layout, scratch_bytes);
        functions.push(emitter.combine(&sums, sum_parts)?);
        module.push_str(&emitter.finish());
    }
    module.push_str("}\n");
    Ok(Text {
        mlir: module,
        functions,
        scratch_bytes,
    })
}

fn is_sum(out: &Out) -> bool {
    matches!(out.known, Known::Columns { .. })
}

// --- emitter ---

/// The text of one function. Instructions are appended to scopes, the function's, the row's, the
/// loop's: what does not depend on a loop stands before it.
struct Emitter<'a> {
    plan: &'a Plan<'a>,
    passes: &'a Passes,
    sums: &'a BTreeMap<usize, Sums>,
    scratch_bytes: u64,
    scopes: Vec<String>,
    headers: Vec<String>,
    next: usize,
    /// The scope of a row.
    row_scope: usize,
    row: String,
    /// Names of scalars, vectors of one scalar, constants, pointers.
    scalars: BTreeMap<Id, String>,
    spread: BTreeMap<(Id, u64), String>,
    pointers: BTreeMap<String, String>,
    /// What the loop that is written now fetches, elsewhere by as much as it computes here.
    fetched: Vec<(String, Kind, usize)>,
    /// Elements of a vector.
    lanes: u64,
    threads: u64,
    shared: u64,
    /// What is kept to be multiplied with a number: the number as a scalar and as a vector.
    scale: Option<(Id, [String; 2])>,
    /// Whether something is stored past the caches: others may read it only behind a fence.
    fenced: bool,
    signature: String,
}

type Emitted<T> = Result<T, String>;

impl<'a> Emitter<'a> {
    fn new(
        plan: &'a Plan<'a>,
        passes: &'a Passes,
        sums: &'a BTreeMap<usize, Sums>,
        scratch_bytes: u64,
    ) -> Emitter<'a> {
        let draws = plan
            .dag
            .nodes
            .iter()
            .any(|node| matches!(node.prim, Prim::Random(_)));
        // The rounds of a random number wait for each other: two vectors of them at a time keep the
        // multipliers busy.
        let lanes = match draws {
            _ if plan.gpu => gpu_lanes(plan),
            true => 2 * LANES,
            false => LANES,
        };
        let threads = if plan.gpu {
            gpu_threads(plan, lanes)
        } else {
            1
        };
        Emitter {
            plan,
            passes,
            sums,
            scratch_bytes,
            scopes: vec![String::new()],
            headers: vec![],
            next: 0,
            row_scope: 0,
            row: String::new(),
            scalars: BTreeMap::new(),
            spread: BTreeMap::new(),
            pointers: BTreeMap::new(),
            fetched: vec![],
            lanes,
            threads,
            shared: 0,
            scale: None,
            fenced: false,
            signature: String::new(),
        }
    }
    fn name(&mut self) -> String {
        self.next += 1;
        format!("%{}", self.next)
    }
    fn line_at(&mut self, scope: usize, text: &str) {
        let _ = writeln!(self.scopes[scope], "{:1$}{text}", "", 4 + 2 * scope);
    }
    fn line(&mut self, text: &str) {
        self.line_at(self.scopes.len() - 1, text);
    }
    fn def_at(&mut self, scope: usize, text: &str) -> String {
        let name = self.name();
        self.line_at(scope, &format!("{name} = {text}"));
        name
    }
    fn def(&mut self, text: &str) -> String {
        self.def_at(self.scopes.len() - 1, text)
    }
    fn open(&mut self, header: &str) {
        self.headers.push(header.into());
        self.scopes.push(String::new());
    }
    /// Ends the innermost scope. What stood before it in the text stands before it still.
    fn close(&mut self) {
        let (inner, header) = (
            self.scopes.pop().unwrap_or_default(),
            self.headers.pop().unwrap_or_default(),
        );
        self.line(&header);
        let scope = self.scopes.len() - 1;
        self.scopes[scope].push_str(&inner);
        // ptxas unrolls loops until registers run out.
        let is_loop = self.plan.gpu && header.contains("scf.for");
        self.line(if is_loop {
            "} {llvm.loop_annotation = #llvm.loop_annotation<unroll = <disable = true>>}"
        } else {
            "}"
        });
    }
    /// A number that is known now, i64.
    fn index(&mut self, i: u64) -> String {
        if let Some(name) = self.pointers.get(&format!("index {i}")) {
            return name.clone();
        }
        let name = self.def_at(0, &format!("arith.constant {i} : i64"));
        self.pointers.insert(format!("index {i}"), name.clone());
        name
    }

    fn begin(&mut self, phase: usize) -> String {
        let symbol = if phase == 0 {
            self.plan.symbol.to_string()
        } else {
            format!("{}_{phase}", self.plan.symbol)
        };
        let n = self.plan.operands.len()
            + self.plan.results.len()
            + usize::from(self.scratch_bytes != 0);
        if self.plan.gpu {
            let pointers: Vec<String> = (0..n)
                .map(|i| format!("%a{i}: !llvm.ptr<1> {{llvm.align = 64 : i64}}"))
                .collect();
            self.signature = format!(
                "  llvm.func @{symbol}({}) attributes {{nvvm.kernel, nvvm.minctasm = 1 : i32, \
                 nvvm.maxntid = array<i32: {}, 1, 1>}} {{\n",
                pointers.join(", "),
                self.threads
            );
            let tid = self.def_at(0, "nvvm.read.ptx.sreg.tid.x : i32");
            self.line_at(0, &format!("%tid = arith.extui {tid} : i32 to i64"));
            let block = self.def_at(0, "nvvm.read.ptx.sreg.ctaid.x : i32");
            self.line_at(0, &format!("%first = arith.extui {block} : i32 to i64"));
            let blocks = self.def_at(0, "nvvm.read.ptx.sreg.nctaid.x : i32");
            self.line_at(0, &format!("%step = arith.extui {blocks} : i32 to i64"));
        } else {
            self.signature = format!(
                "  llvm.func @{symbol}(%args: !llvm.ptr {{llvm.noalias}}, %first: i64, %end: i64) \
                 attributes \
                 {{passthrough = [\"nounwind\", [\"prefer-vector-width\", \"512\"]]}} {{\n"
            );
            for i in 0..n {
                let at = self.def_at(
                    0,
                    &format!("llvm.getelementptr %args[{i}] : (!llvm.ptr) -> !llvm.ptr, !llvm.ptr"),
                );
                self.line_at(
                    0,
                    &format!("%a{i} = llvm.load {at} : !llvm.ptr -> !llvm.ptr"),
                );
            }
        }
        symbol
    }
    fn finish(mut self) -> String {
        if self.fenced {
            self.line_at(0, "llvm.fence seq_cst");
        }
        self.line_at(0, "llvm.return");
        let mut text = String::new();
        if self.shared != 0 {
            let name = self.shared_name();
            let _ = writeln!(
                text,
                "  llvm.mlir.global internal @{name}() {{addr_space = 3 : i32, alignment = 16 : \
                 i64}} : \
                 !llvm.array<{} x i8>",
                self.shared
            );
        }
        text + &self.signature + &self.scopes[0] + "  }\n"
    }
    fn shared_name(&self) -> String {
        format!("{}_shared", self.plan.symbol)
    }
    fn pointer_type(&self) -> &'static str {
        if self.plan.gpu {
            "!llvm.ptr<1>"
        } else {
            "!llvm.ptr"
        }
    }
    /// The pointer `at` elements behind another.
    fn offset_at(&mut self, scope: usize, pointer: &str, at: &str, kind: Kind) -> String {
        let (ty, k) = (self.pointer_type(), kind.name());
        self.def_at(
            scope,
            &format!("llvm.getelementptr {pointer}[{at}] : ({ty}, i64) -> {ty}, {k}"),
        )
    }
    fn offset(&mut self, pointer: &str, at: &str, kind: Kind) -> String {
        self.offset_at(self.scopes.len() - 1, pointer, at, kind)
    }

    // --- memory ---

    /// Where the row's elements of an operand or result are: its pointer, and how it is aligned.
    fn row_pointer(&mut self, argument: usize, axes: Axes, kind: Kind) -> (String, u64) {
        let strides = self.plan.space.strides(axes);
        let most = if self.plan.gpu { 16 } else { 64 };
        let bytes = strides.iter().fold(self.lanes, |all, &s| gcd(all, s)) * kind.bytes();
        let align = (1 << bytes.trailing_zeros()).min(most);
        let base = format!("%a{argument}");
        if strides.iter().all(|&s| s == 0) {
            return (base, align);
        }
        let key = format!("row {argument} {axes}");
        if let Some(name) = self.pointers.get(&key) {
            return (name.clone(), align);
        }
        let offset = self.row_offset(&strides);
        let name = self.offset_at(self.row_scope, &base, &offset, kind);
        self.pointers.insert(key, name.clone());
        (name, align)
    }
    /// Σ index of axis × stride.
    fn row_offset(&mut self, strides: &[u64]) -> String {
        let key = format!("offset {strides:?}");
        if let Some(name) = self.pointers.get(&key) {
            return name.clone();
        }
        let sizes = &self.plan.space.sizes;
        let scope = self.row_scope;
        let row = self.row.clone();
        let inner = strides[strides.len() - 1];
        let regular = (1..strides.len()).all(|i| strides[i - 1] == strides[i] * sizes[i]);
        let name = if regular {
            let stride = self.index(inner);
            self.def_at(scope, &format!("arith.muli {row}, {stride} : i64"))
        } else {
            let mut sum = self.index(0);
            let mut below = 1;
            for i in (0..strides.len()).rev() {
                if strides[i] != 0 {
                    let (unit, size, stride) = (
                        self.index(below),
                        self.index(sizes[i]),
                        self.index(strides[i]),
                    );
                    let at = self.def_at(scope, &format!("arith.divui {row}, {unit} : i64"));
                    let at = self.def_at(scope, &format!("arith.remui {at}, {size} : i64"));
                    let at = self.def_at(scope, &format!("arith.muli {at}, {stride} : i64"));
                    sum = self.def_at(scope, &format!("arith.addi {sum}, {at} : i64"));
                }
                below *= sizes[i];
            }
            sum
        };
        self.pointers.insert(key, name.clone());
        name
    }
    fn load(&mut self, pointer: &str, at: &str, kind: Kind, width: u64, align: u64) -> String {
        let from = self.offset(pointer, at, kind);
        let (ty, align) = (
            self.pointer_type(),
            if width == 1 { kind.bytes() } else { align },
        );
        self.def(&format!(
            "llvm.load {from} {{alignment = {align} : i64}} : {ty} -> {}",
            type_of(kind, width)
        ))
    }
    fn store(&mut self, x: &str, pointer: &str, at: &str, kind: Kind, width: u64, align: u64) {
        self.store_as("", x, pointer, at, kind, width, align);
    }
    /// The same with an attribute.
    #[allow(clippy::too_many_arguments, reason = "they are a store's")]
    fn store_as(
        &mut self,
        how: &str,
        x: &str,
        pointer: &str,
        at: &str,
        kind: Kind,
        width: u64,
        align: u64,
    ) {
        let to = self.offset(pointer, at, kind);
        let (ty, align) = (
            self.pointer_type(),
            if width == 1 { kind.bytes() } else { align },
        );
        self.line(&format!(
            "llvm.store {x}, {to} {{alignment = {align} : i64{how}}} : {}, {ty}",
            type_of(kind, width)
        ));
    }

    // --- instructions ---

    fn constant(&mut self, bits: u64, kind: Kind, width: u64) -> String {
        let value = match kind {
            Kind::I1 => (bits != 0).to_string(),
            Kind::F16 | Kind::BF16 => format!("0x{bits:04X}"),
            Kind::F32 => format!("0x{bits:08X}"),
            Kind::F64 => format!("0x{bits:016X}"),
            Kind::I8 => (bits as i8).to_string(),
            Kind::I16 => (bits as i16).to_string(),
            Kind::I32 => (bits as i32).to_string(),
            Kind::I64 => (bits as i64).to_string(),
        };
        match width {
            1 if kind == Kind::I1 => self.def_at(0, &format!("arith.constant {value}")),
            1 => self.def_at(0, &format!("arith.constant {value} : {}", kind.name())),
            _ => self.def_at(
                0,
                &format!("arith.constant dense<{value}> : {}", type_of(kind, width)),
            ),
        }
    }
    /// One instruction on scalars or vectors.
    fn instruction(&mut self, scope: usize, id: Id, args: &[String], width: u64) -> String {
        let text = instruction_text(self.plan.dag, id, args, width);
        self.def_at(scope, &text)
    }
    /// A value that does not vary along the row, as a scalar.
    fn scalar(&mut self, id: Id) -> String {
        if let Some(name) = self.scalars.get(&id) {
            return name.clone();
        }
        let node = &self.plan.dag.nodes[id];
        let scope = if node.span.rows { self.row_scope } else { 0 };
        let ty = self.pointer_type();
        let name = match &node.prim {
            &Prim::Const(bits) => self.constant(bits, node.kind, 1),
            &Prim::Load(i, axes) => {
                let (pointer, _) = self.row_pointer(i, axes, node.kind);
                let (align, kind) = (node.kind.bytes(), node.kind.name());
                self.def_at(
                    scope,
                    &format!("llvm.load {pointer} {{alignment = {align} : i64}} : {ty} -> {kind}"),
                )
            }
            &Prim::LoadAt(i, at) => {
                let at = self.index(at);
                let pointer = self.offset_at(0, &format!("%a{i}"), &at, node.kind);
                let (align, kind) = (node.kind.bytes(), node.kind.name());
                self.def_at(
                    0,
                    &format!("llvm.load {pointer} {{alignment = {align} : i64}} : {ty} -> {kind}"),
                )
            }
            Prim::Power => {
                let (x, n) = (self.scalar(node.args[0]), self.scalar(node.args[1]));
                self.power(&x, &n)
            }
            _ => {
                let args: Vec<String> = node
                    .args
                    .clone()
                    .into_iter()
                    .map(|a| self.scalar(a))
                    .collect();
                self.instruction(scope, id, &args, 1)
            }
        };
        self.scalars.insert(id, name.clone());
        name
    }
    /// A value that does not vary along the row, as a vector.
    fn spread(&mut self, id: Id, width: u64) -> String {
        if width == 1 {
            return self.scalar(id);
        }
        if let Some(name) = self.spread.get(&(id, width)) {
            return name.clone();
        }
        let node = &self.plan.dag.nodes[id];
        let name = match node.prim {
            Prim::Const(bits) => self.constant(bits, node.kind, width),
            _ => {
                let scope = if node.span.rows { self.row_scope } else { 0 };
                let x = self.scalar(id);
                let (from, to) = (node.kind.name(), type_of(node.kind, width));
                self.def_at(scope, &format!("vector.broadcast {x} : {from} to {to}"))
            }
        };
        self.spread.insert((id, width), name.clone());
        name
    }
    /// x^n by squares, as often as n has bits.
    fn power(&mut self, x: &str, n: &str) -> String {
        let (zero, one, most) = (self.index(0), self.index(1), self.index(64));
        let unit = self.constant(1f64.to_bits(), Kind::F64, 1);
        let negative = self.def_at(0, &format!("arith.cmpi slt, {n}, {zero} : i64"));
        let minus = self.def_at(0, &format!("arith.subi {zero}, {n} : i64"));
        let n = self.def_at(0, &format!("arith.select {negative}, {minus}, {n} : i64"));
        let result = self.name();
        let [acc, base, rest] = [0, 1, 2].map(|i| format!("{result}_{i}").replace('%', "%p"));
        self.line_at(
            0,
            &format!(
                "{result}:3 = scf.for %i{} = {zero} to {most} step {one} iter_args({acc} = \
                 {unit}, {base} = {x}, \
                 {rest} = {n}) -> (f64, f64, i64) : i64 {{",
                self.next
            ),
        );
        let bit = self.def_at(0, &format!("arith.andi {rest}, {one} : i64"));
        let bit = self.def_at(0, &format!("arith.cmpi ne, {bit}, {zero} : i64"));
        let product = self.def_at(0, &format!("arith.mulf {acc}, {base} : f64"));
        let chosen = self.def_at(0, &format!("arith.select {bit}, {product}, {acc} : f64"));
        let square = self.def_at(0, &format!("arith.mulf {base}, {base} : f64"));
        let half = self.def_at(0, &format!("arith.shrui {rest}, {one} : i64"));
        self.line_at(
            0,
            &format!("scf.yield {chosen}, {square}, {half} : f64, f64, i64"),
        );
        self.line_at(0, "}");
        let inverse = self.def_at(0, &format!("arith.divf {unit}, {result}#0 : f64"));
        self.def_at(
            0,
            &format!("arith.select {negative}, {inverse}, {result}#0 : f64"),
        )
    }

    /// The elements `at..at + width` of all that a pass needs: names of the instructions' results.
    fn elements(
        &mut self,
        pass: &Pass,
        at: &str,
        width: u64,
        mut names: BTreeMap<Id, String>,
    ) -> BTreeMap<Id, String> {
        let dag = self.plan.dag;
        for &id in &pass.needs {
            if names.contains_key(&id) {
                continue;
            }
            let node = &dag.nodes[id];
            let name = if pass.kept.contains(&id) {
                let (pointer, align) = self.buffer(id);
                let x = self.load(&pointer, at, node.kind, width, align);
                match self.scale.clone().filter(|(of, _)| *of == id) {
                    Some((_, [scalar, vector])) => {
                        let scale = if width == 1 { scalar } else { vector };
                        self.def(&format!(
                            "arith.mulf {x}, {scale} : {}",
                            type_of(node.kind, width)
                        ))
                    }
                    None => x,
                }
            } else {
                match node.prim {
                    Prim::Load(i, axes) => {
                        let (pointer, align) = self.row_pointer(i, axes, node.kind);
                        self.load(&pointer, at, node.kind, width, align)
                    }
                    Prim::Random(stream) => {
                        let (seed, step) = (self.scalar(node.args[0]), self.scalar(node.args[1]));
                        self.random(&seed, &step, stream, at, width)
                    }
                    _ => {
                        let args: Vec<String> = node
                            .args
                            .iter()
                            .map(|&a| self.element(a, width, &names))
                            .collect();
                        self.instruction(self.scopes.len() - 1, id, &args, width)
                    }
                }
            };
            names.insert(id, name);
        }
        names
    }
    fn element(&mut self, id: Id, width: u64, names: &BTreeMap<Id, String>) -> String {
        match self.plan.dag.nodes[id].span.columns {
            true => names[&id].clone(),
            false => self.spread(id, width),
        }
    }
    /// The memory of something kept.
    fn buffer(&mut self, id: Id) -> (String, u64) {
        let kind = self.plan.dag.kind(id);
        match self.passes.buffers[&id] {
            Buffer::Stack(n) => (format!("%buffer{n}"), (self.lanes * kind.bytes()).min(64)),
            Buffer::Result(j) => {
                let out = &self.plan.results[j];
                self.row_pointer(
                    self.plan.operands.len() + j,
                    self.plan.space.axes(out.value),
                    kind,
                )
            }
        }
    }

    /// Words of `runtime::kernels::random`: word i % 4 of block i / 4, of the element's number i.
    fn random(&mut self, seed: &str, step: &str, stream: u32, at: &str, width: u64) -> String {
        let space = self.plan.space;
        let columns = self.index(space.columns());
        let (row, scope) = (self.row.clone(), self.row_scope);
        let base = match space.rows() {
            1 => self.index(0),
            _ => self.def_at(scope, &format!("arith.muli {row}, {columns} : i64")),
        };
        let first = self.def(&format!("arith.addi {base}, {at} : i64"));
        // Whole blocks, if rows begin with one; else each element has its block computed.
        let whole =
            width.is_multiple_of(4) && (space.rows() == 1 || space.columns().is_multiple_of(4));
        let n = if whole { width / 4 } else { width };
        let (wide, word) = (format!("vector<{n}xi64>"), format!("vector<{n}xi32>"));
        // Blocks lie in fours in the order that puts them right below, by cheap instructions.
        let in_fours = whole && n.is_multiple_of(4);
        let place = |i: u64| {
            if in_fours {
                i / 4 * 4 + [0, 2, 1, 3][i as usize % 4]
            } else {
                i
            }
        };
        let list = |numbers: &mut dyn Iterator<Item = u64>| {
            numbers
                .map(|i| i.to_string())
                .collect::<Vec<_>>()
                .join(", ")
        };
        let scale = if whole { 4 } else { 1 };
        let numbers = list(&mut (0..n).map(|i| place(i) * scale));
        let lanes = self.def_at(0, &format!("arith.constant dense<[{numbers}]> : {wide}"));
        let first = self.def(&format!("vector.broadcast {first} : i64 to {wide}"));
        let element = self.def(&format!("arith.addi {first}, {lanes} : {wide}"));
        // A vector even if it has but one element.
        let wide_constant = |emitter: &mut Self, i: u64| {
            emitter.def_at(0, &format!("arith.constant dense<{i}> : {wide}"))
        };
        let (two, half) = (wide_constant(self, 2), wide_constant(self, 32));
        let block = self.def(&format!("arith.shrui {element}, {two} : {wide}"));
        // Words are kept in twice their bits, so that products have room. What is above a word is
        // rubbish: the processor's products of words do not read it, so that masks before them cost
        // nothing.
        let mask = wide_constant(self, 0xFFFF_FFFF);
        let high = self.def(&format!("arith.shrui {block}, {half} : {wide}"));
        // Seed and step are scalars.
        let (shift, all) = (self.index(32), self.index(0xFFFF_FFFF));
        let key0 = self.def_at(0, &format!("arith.andi {seed}, {all} : i64"));
        let key1 = self.def_at(0, &format!("arith.shrui {seed}, {shift} : i64"));
        let step = self.def_at(0, &format!("arith.andi {step}, {all} : i64"));
        let step = self.def_at(0, &format!("vector.broadcast {step} : i64 to {wide}"));
        let stream = wide_constant(self, stream.into());
        let mut counter = [block, high, stream, step];
        let mut key = [key0, key1];
        let factors = [
            wide_constant(self, 0xD251_1F53),
            wide_constant(self, 0xCD9E_8D57),
        ];
        for round in 0..10 {
            if round != 0 {
                for (key, add) in key.iter_mut().zip([0x9E37_79B9u64, 0xBB67_AE85]) {
                    let add = self.index(add);
                    *key = self.def_at(0, &format!("arith.addi {key}, {add} : i64"));
                    *key = self.def_at(0, &format!("arith.andi {key}, {all} : i64"));
                }
            }
            let keys = [0, 1]
                .map(|i| self.def_at(0, &format!("vector.broadcast {} : i64 to {wide}", key[i])));
            let mut products = vec![];
            for (i, factor) in [0, 2].into_iter().zip(&factors) {
                let word = self.def(&format!("arith.andi {}, {mask} : {wide}", counter[i]));
                let product = self.def(&format!("arith.muli {word}, {factor} : {wide}"));
                let high = self.def(&format!("arith.shrui {product}, {half} : {wide}"));
                products.push((product, high));
            }
            let mut mix = |high: &str, word_of: &str, key: &str| {
                let x = self.def(&format!("arith.xori {high}, {word_of} : {wide}"));
                self.def(&format!("arith.xori {x}, {key} : {wide}"))
            };
            let c0 = mix(&products[1].1, &counter[1], &keys[0]);
            let c2 = mix(&products[0].1, &counter[3], &keys[1]);
            counter = [c0, products[1].0.clone(), c2, products[0].0.clone()];
        }
        if whole {
            // Words of a block follow each other: 0 1 and 2 3 are put into one number each, then
            // these beside each other.
            let halves = format!("vector<{}xi32>", 2 * n);
            let counter = counter
                .map(|words| self.def(&format!("vector.bitcast {words} : {wide} to {halves}")));
            let lower = list(&mut (0..n).flat_map(|i| [2 * i, 2 * (n + i)]));
            let [a, b] = [0, 2].map(|i| {
                let (a, b) = (&counter[i], &counter[i + 1]);
                let pair = self.def(&format!(
                    "vector.shuffle {a}, {b} [{lower}] : {halves}, {halves}"
                ));
                self.def(&format!("vector.bitcast {pair} : {halves} to {wide}"))
            });
            let order = list(&mut (0..n).flat_map(|i| [place(i), n + place(i)]));
            let blocks = self.def(&format!(
                "vector.shuffle {a}, {b} [{order}] : {wide}, {wide}"
            ));
            return self.def(&format!(
                "vector.bitcast {blocks} : vector<{}xi64> to vector<{width}xi32>",
                2 * n
            ));
        }
        let counter =
            counter.map(|words| self.def(&format!("arith.trunci {words} : {wide} to {word}")));
        let three = wide_constant(self, 3);
        let which = self.def(&format!("arith.andi {element}, {three} : {wide}"));
        let mut chosen = counter[3].clone();
        for (i, words) in counter.iter().enumerate().take(3) {
            let number = wide_constant(self, i as u64);
            let this = self.def(&format!("arith.cmpi eq, {which}, {number} : {wide}"));
            chosen = self.def(&format!(
                "arith.select {this}, {words}, {chosen} : vector<{n}xi1>, {word}"
            ));
        }
        match width {
            1 => self.def(&format!("vector.extract {chosen}[0] : i32 from {word}")),
            _ => chosen,
        }
    }

    // --- folds ---

    fn start(&mut self, fold: Fold, kind: Kind, width: u64) -> String {
        let bits = match (fold, kind) {
            (Fold::Sum | Fold::Any, _) => 0,
            (Fold::Max | Fold::MaxNumber, Kind::F32) => f32::NEG_INFINITY.to_bits().into(),
            (Fold::Min, Kind::F32) => f32::INFINITY.to_bits().into(),
            (Fold::Max | Fold::MaxNumber, Kind::F64) => f64::NEG_INFINITY.to_bits(),
            (Fold::Min, Kind::F64) => f64::INFINITY.to_bits(),
            (Fold::Max | Fold::MaxNumber, _) => i64::MIN as u64,
            (Fold::Min, _) => i64::MAX as u64,
        };
        self.constant(bits, kind, width)
    }
    fn combine_two(&mut self, fold: Fold, kind: Kind, width: u64, a: &str, b: &str) -> String {
        let ty = type_of(kind, width);
        let mask = type_of(Kind::I1, width);
        let (real, most) = (kind.is_float(), fold != Fold::Min);
        match fold {
            Fold::Sum if real => self.def(&format!("arith.addf {a}, {b} : {ty}")),
            Fold::Sum => self.def(&format!("arith.addi {a}, {b} : {ty}")),
            Fold::Any => self.def(&format!("arith.ori {a}, {b} : {ty}")),
            Fold::Max | Fold::MaxNumber | Fold::Min => {
                let wins = match real {
                    true if fold == Fold::MaxNumber => {
                        self.def(&format!("arith.cmpf ogt, {a}, {b} : {ty}"))
                    }
                    true => {
                        let name = if most { "ogt" } else { "olt" };
                        let wins = self.def(&format!("arith.cmpf {name}, {a}, {b} : {ty}"));
                        let nan = self.def(&format!("arith.cmpf uno, {a}, {a} : {ty}"));
                        self.def(&format!("arith.ori {wins}, {nan} : {mask}"))
                    }
                    false => {
                        let name = if most { "sgt" } else { "slt" };
                        self.def(&format!("arith.cmpi {name}, {a}, {b} : {ty}"))
                    }
                };
                match width {
                    1 => self.def(&format!("arith.select {wins}, {a}, {b} : {ty}")),
                    _ => self.def(&format!("arith.select {wins}, {a}, {b} : {mask}, {ty}")),
                }
            }
        }
    }
    /// A vector's elements as one number, by halves.
    fn across(&mut self, fold: Fold, kind: Kind, mut width: u64, x: &str) -> String {
        let mut x = x.to_string();
        while 1 < width {
            let (ty, half) = (format!("vector<{width}x{}>", kind.name()), width / 2);
            let halves = [0, half].map(|at| {
                let to = format!("vector<{half}x{}>", kind.name());
                self.def(&format!(
                    "vector.extract_strided_slice {x} {{offsets = [{at}], sizes = [{half}], \
                     strides = [1]}} : {ty} to {to}"
                ))
            });
            width = half;
            if width == 1 {
                let ty = format!("vector<1x{}>", kind.name());
                let [a, b] = halves.map(|h| {
                    self.def(&format!(
                        "vector.extract {h}[0] : {} from {ty}",
                        kind.name()
                    ))
                });
                return self.combine_two(fold, kind, 1, &a, &b);
            }
            x = self.combine_two(fold, kind, width, &halves[0], &halves[1]);
        }
        x
    }
    /// A number of each thread as one, known to all threads of the block. `slot` is its place in
    /// shared memory.
    fn across_threads(&mut self, fold: Fold, kind: Kind, x: &str, slot: u64) -> String {
        // Bits travel as integers.
        let (travels, mut x) = match kind {
            Kind::I1 => (Kind::I32, self.def(&format!("arith.extui {x} : i1 to i32"))),
            _ => (kind, x.to_string()),
        };
        let ty = travels.name();
        let (all, clamp) = (
            self.def("arith.constant -1 : i32"),
            self.def("arith.constant 31 : i32"),
        );
        for distance in [16, 8, 4, 2, 1] {
            let distance = self.def(&format!("arith.constant {distance} : i32"));
            let other = match travels.bytes() {
                4 => self.def(&format!(
                    "nvvm.shfl.sync bfly {all}, {x}, {distance}, {clamp} : {ty} -> {ty}"
                )),
                _ => {
                    let halves = self.def(&format!("llvm.bitcast {x} : {ty} to vector<2xi32>"));
                    let mut moved = self.def("llvm.mlir.undef : vector<2xi32>");
                    for i in 0..2 {
                        let half = self.def(&format!(
                            "vector.extract {halves}[{i}] : i32 from vector<2xi32>"
                        ));
                        let half = self.def(&format!(
                            "nvvm.shfl.sync bfly {all}, {half}, {distance}, {clamp} : i32 -> i32"
                        ));
                        moved = self.def(&format!(
                            "vector.insert {half}, {moved} [{i}] : i32 into vector<2xi32>"
                        ));
                    }
                    self.def(&format!("llvm.bitcast {moved} : vector<2xi32> to {ty}"))
                }
            };
            x = self.combine_two(fold, travels, 1, &x, &other);
        }
        let warps = self.threads / 32;
        if 1 < warps {
            self.shared = self.shared.max((slot + 1) * 256);
            let name = self.shared_name();
            let base = self.def(&format!("llvm.mlir.addressof @{name} : !llvm.ptr<3>"));
            let (five, start) = (self.index(5), self.index(slot * 32));
            let warp = self.def(&format!("arith.shrui %tid, {five} : i64"));
            let at = self.def(&format!("arith.addi {warp}, {start} : i64"));
            let to = self.def(&format!(
                "llvm.getelementptr {base}[{at}] : (!llvm.ptr<3>, i64) -> !llvm.ptr<3>, i64"
            ));
            // Every thread of a warp has the same number.
            self.line(&format!(
                "llvm.store {x}, {to} {{alignment = 8 : i64}} : {ty}, !llvm.ptr<3>"
            ));
            self.line("nvvm.barrier0");
            let mut sum = String::new();
            for i in 0..warps {
                let at = slot * 32 + i;
                let from = self.def(&format!(
                    "llvm.getelementptr {base}[{at}] : (!llvm.ptr<3>) -> !llvm.ptr<3>, i64"
                ));
                let one = self.def(&format!(
                    "llvm.load {from} {{alignment = 8 : i64}} : !llvm.ptr<3> -> {ty}"
                ));
                sum = if i == 0 {
                    one
                } else {
                    self.combine_two(fold, travels, 1, &sum, &one)
                };
            }
            x = sum;
        }
        match kind {
            Kind::I1 => self.def(&format!("arith.trunci {x} : i32 to i1")),
            _ => x,
        }
    }

    // --- loops ---

    /// A pass over columns `lo..hi` of the row.
    fn pass(&mut self, pass: &Pass, columns: &Columns, slots: u64) {
        let folds: Vec<(Fold, Kind)> = pass
            .folds
            .iter()
            .map(|&id| match self.plan.dag.nodes[id].prim {
                Prim::Fold(fold) => (fold, self.plan.dag.kind(id)),
                _ => unreachable!("a pass's folds should be folds"),
            })
            .collect();
        let lanes = self.lanes;
        // Sums wait for each other: two vectors at a time keep the adders busy, if nothing else
        // does.
        let busy = folds.is_empty() || pass.needs.iter().any(|&id| self.plan.dag.dear[id]);
        // A piece may have an odd number of vectors.
        let odd = columns.range.is_some() && !columns.whole.is_multiple_of(2 * lanes);
        let unroll = if busy || odd || self.plan.gpu || columns.whole < 2 * lanes {
            1
        } else {
            2
        };
        let mut totals: Vec<Option<String>> = vec![None; folds.len()];
        if 0 < columns.whole {
            let block = lanes * unroll;
            let main = columns.whole / block * block;
            let (from, to) = match &columns.range {
                None => (self.index(0), self.index(main)),
                Some((from, to)) => (from.clone(), to.clone()),
            };
            let mut accumulators: Vec<Vec<String>> = (0..unroll)
                .map(|_| {
                    folds
                        .iter()
                        .map(|&(fold, kind)| self.start(fold, kind, lanes))
                        .collect()
                })
                .collect();
            if 0 < main {
                let types: Vec<String> = folds.iter().map(|f| type_of(f.1, lanes)).collect();
                let flat: Vec<String> = accumulators.iter().flatten().cloned().collect();
                let all: Vec<String> = (0..unroll).flat_map(|_| types.clone()).collect();
                let (from, step) = self.shared_loop(&from, block, lanes);
                let once = self.plan.gpu && columns.range.is_none() && main == lanes * self.threads;
                let body = |e: &mut Self, j: &str, sums: &[String]| {
                    let mut next = vec![];
                    for u in 0..unroll {
                        let at = match u {
                            0 => j.to_string(),
                            _ => {
                                let more = e.index(u * lanes);
                                e.def(&format!("arith.addi {j}, {more} : i64"))
                            }
                        };
                        let before = &sums[u as usize * folds.len()..][..folds.len()];
                        next.extend(e.body(pass, &at, lanes, &folds, before));
                    }
                    next
                };
                let sums = match once {
                    true => body(self, &from, &flat),
                    false => self.fold_loop(&from, &to, &step, &flat, &all, body),
                };
                accumulators = sums
                    .chunks(folds.len().max(1))
                    .map(<[String]>::to_vec)
                    .collect();
                accumulators.resize(unroll as usize, vec![]);
            }
            // What is left of whole vectors.
            for (u, at) in (main..columns.whole).step_by(lanes as usize).enumerate() {
                let at = self.index(at);
                let before = accumulators[u].clone();
                accumulators[u] = self.body(pass, &at, lanes, &folds, &before);
            }
            for (f, &(fold, kind)) in folds.iter().enumerate() {
                let mut sum = accumulators[0][f].clone();
                for other in &accumulators[1..] {
                    sum = self.combine_two(fold, kind, lanes, &sum, &other[f]);
                }
                totals[f] = Some(self.across(fold, kind, lanes, &sum));
            }
        }
        if columns.rest {
            let (from, to) = match &columns.range {
                None => (
                    self.index(columns.whole),
                    self.index(self.plan.space.columns()),
                ),
                Some(_) => columns.tail.clone(),
            };
            let starts: Vec<String> = folds
                .iter()
                .map(|&(fold, kind)| self.start(fold, kind, 1))
                .collect();
            let types: Vec<String> = folds.iter().map(|f| type_of(f.1, 1)).collect();
            let (from, step) = self.shared_loop(&from, 1, 1);
            let sums = self.fold_loop(&from, &to, &step, &starts, &types, |e, j, sums| {
                e.body(pass, j, 1, &folds, sums)
            });
            for (f, &(fold, kind)) in folds.iter().enumerate() {
                totals[f] = Some(match &totals[f] {
                    Some(total) => self.combine_two(fold, kind, 1, &total.clone(), &sums[f]),
                    None => sums[f].clone(),
                });
            }
        }
        for (f, &(fold, kind)) in folds.iter().enumerate() {
            let mut total = totals[f]
                .clone()
                .unwrap_or_else(|| self.start(fold, kind, 1));
            if self.plan.gpu {
                total = self.across_threads(fold, kind, &total, slots + f as u64);
            }
            self.scalars.insert(pass.folds[f], total);
        }
    }
    /// Two passes in one reading of a long row. The first finds the largest element, the second the
    /// sum of the exponentials below it: each block is gone through by both, with its own largest
    /// element, and its sum is scaled in the end.
    fn largest_and_sum(&mut self, passes: [&Pass; 2], found: Exponentials) {
        let ahead = self.ahead(passes[0]);
        self.blocks(|e, block, columns| {
            e.pass(passes[0], columns, 0);
            // Infinitely small elements are to be 0, even if there is nothing else in the block.
            let (max, least) = (
                e.scalars[&found.max].clone(),
                e.constant(f32::MIN.to_bits().into(), Kind::F32, 1),
            );
            let max = e.combine_two(Fold::MaxNumber, Kind::F32, 1, &max, &least);
            e.store(&max, BLOCK_SCALES, block, Kind::F32, 1, 4);
            e.scalars.insert(found.max, max);
            e.fetched.clone_from(&ahead);
            e.pass(passes[1], columns, 0);
            e.fetched.clear();
            e.store(
                &e.scalars[&found.sum].clone(),
                BLOCK_SUMS,
                block,
                Kind::F32,
                1,
                4,
            );
        });
        let (zero, one) = (self.index(0), self.index(1));
        let all = self.index(self.plan.space.columns().div_ceil(BLOCK));
        let f32 = [Kind::F32.name().to_string()];
        let start = self.start(Fold::MaxNumber, Kind::F32, 1);
        let max = self.fold_loop(&zero, &all, &one, &[start], &f32, |e, block, max| {
            let x = e.load(BLOCK_SCALES, block, Kind::F32, 1, 4);
            vec![e.combine_two(Fold::MaxNumber, Kind::F32, 1, &x, &max[0])]
        });
        let start = self.start(Fold::Sum, Kind::F32, 1);
        let sum = self.fold_loop(&zero, &all, &one, &[start], &f32, |e, block, sum| {
            let x = e.load(BLOCK_SCALES, block, Kind::F32, 1, 4);
            let below = e.def(&format!("arith.subf {x}, {} : f32", max[0]));
            let mut dag = Dag::new(Functions::Polynomials);
            let load = dag.load(0, 0, Kind::F32, super::dag::Span::default());
            let exponential = dag.exp_below(load);
            let scale = e.apart(&dag, load, &below, exponential, 1);
            e.store(&scale, BLOCK_SCALES, block, Kind::F32, 1, 4);
            let part = e.load(BLOCK_SUMS, block, Kind::F32, 1, 4);
            let part = e.def(&format!("arith.mulf {part}, {scale} : f32"));
            vec![e.combine_two(Fold::Sum, Kind::F32, 1, &sum[0], &part)]
        });
        self.scalars.insert(found.max, max[0].clone());
        self.scalars.insert(found.sum, sum[0].clone());
    }
    /// A later pass, which reads the exponentials that were kept.
    fn scaled(&mut self, pass: &Pass, kept: Id) {
        self.blocks(|e, block, columns| {
            let scalar = e.load(BLOCK_SCALES, block, Kind::F32, 1, 4);
            let vector = e.def(&format!(
                "vector.broadcast {scalar} : f32 to {}",
                type_of(Kind::F32, e.lanes)
            ));
            e.scale = Some((kept, [scalar, vector]));
            e.pass(pass, columns, 0);
            e.scale = None;
        });
    }
    /// Goes through a row in blocks: `body` has a block's number and columns. What it finds is
    /// known in the block alone.
    fn blocks(&mut self, body: impl Fn(&mut Self, &str, &Columns)) {
        let columns = self.plan.space.columns();
        let block = |e: &mut Self, number: &str, columns: Columns| {
            let known = (e.scalars.clone(), e.spread.clone(), e.pointers.clone());
            let row_scope = std::mem::replace(&mut e.row_scope, e.scopes.len() - 1);
            body(e, number, &columns);
            e.row_scope = row_scope;
            (e.scalars, e.spread, e.pointers) = known;
        };
        let (full, whole) = (columns / BLOCK, columns / self.lanes * self.lanes);
        if 0 < full {
            let (zero, all, one, size) = (
                self.index(0),
                self.index(full),
                self.index(1),
                self.index(BLOCK),
            );
            self.fold_loop(&zero, &all, &one, &[], &[], |e, number, _| {
                let from = e.def(&format!("arith.muli {number}, {size} : i64"));
                let to = e.def(&format!("arith.addi {from}, {size} : i64"));
                let tail = (to.clone(), to.clone());
                block(
                    e,
                    number,
                    Columns {
                        whole: BLOCK,
                        rest: false,
                        range: Some((from, to)),
                        tail,
                    },
                );
                vec![]
            });
        }
        if full * BLOCK < columns {
            let [number, from, to, end] =
                [full, full * BLOCK, whole, columns].map(|i| self.index(i));
            let range = Some((from, to.clone()));
            let rest = whole != columns;
            block(
                self,
                &number,
                Columns {
                    whole: whole - full * BLOCK,
                    rest,
                    range,
                    tail: (to, end),
                },
            );
        }
    }
    /// The operands that a pass reads, some blocks ahead.
    fn ahead(&mut self, pass: &Pass) -> Vec<(String, Kind, usize)> {
        let (mut found, distance) = (vec![], self.index(AHEAD * BLOCK));
        for &id in pass.needs.iter().filter(|id| !pass.kept.contains(id)) {
            let node = &self.plan.dag.nodes[id];
            if let Prim::Load(i, axes) = node.prim {
                let (pointer, _) = self.row_pointer(i, axes, node.kind);
                found.push((
                    self.offset_at(self.row_scope, &pointer, &distance, node.kind),
                    node.kind,
                    0,
                ));
            }
        }
        found
    }
    /// Where a thread's share of a loop begins, and its step.
    fn shared_loop(&mut self, from: &str, step: u64, each: u64) -> (String, String) {
        if !self.plan.gpu {
            return (from.into(), self.index(step));
        }
        let each = self.index(each);
        let at = self.def(&format!("arith.muli %tid, {each} : i64"));
        (
            self.def(&format!("arith.addi {from}, {at} : i64")),
            self.index(step * self.threads),
        )
    }
    /// A loop that carries values along.
    fn fold_loop(
        &mut self,
        from: &str,
        to: &str,
        step: &str,
        starts: &[String],
        types: &[String],
        body: impl FnOnce(&mut Self, &str, &[String]) -> Vec<String>,
    ) -> Vec<String> {
        let name = self.name();
        let j = name.replace('%', "%j");
        let carried: Vec<String> = (0..starts.len())
            .map(|i| format!("{}_{i}", name.replace('%', "%s")))
            .collect();
        if starts.is_empty() {
            self.open(&format!(
                "scf.for {j} = {from} to {to} step {step} : i64 {{"
            ));
            body(self, &j, &[]);
            self.close();
            return vec![];
        }
        let pairs: Vec<String> = carried
            .iter()
            .zip(starts)
            .map(|(c, s)| format!("{c} = {s}"))
            .collect();
        let (pairs, list) = (pairs.join(", "), types.join(", "));
        let n = starts.len();
        self.open(&format!(
            "{name}:{n} = scf.for {j} = {from} to {to} step {step} iter_args({pairs}) -> ({list}) \
             : i64 {{"
        ));
        let next = body(self, &j, &carried);
        self.line(&format!("scf.yield {} : {list}", next.join(", ")));
        self.close();
        (0..n).map(|i| format!("{name}#{i}")).collect()
    }
    /// The operands that the first of several passes reads: where the next row of each begins, and
    /// into which cache it fits. The memory waits while passes compute over a row that is in a
    /// cache.
    fn next_row(&mut self, first: &Pass) -> Vec<(String, Kind, usize)> {
        let (columns, mut found) = (self.plan.space.columns(), vec![]);
        for &id in &first.needs {
            let node = &self.plan.dag.nodes[id];
            let Prim::Load(i, axes) = node.prim else {
                continue;
            };
            let strides = self.plan.space.strides(axes);
            let follows = strides.last() == Some(&columns);
            let cache = FETCHED
                .iter()
                .position(|&most| columns * node.kind.bytes() <= most);
            let Some(cache) =
                cache.filter(|_| follows && !self.plan.gpu && !first.kept.contains(&id))
            else {
                continue;
            };
            let (pointer, _) = self.row_pointer(i, axes, node.kind);
            let (columns, kind) = (self.index(columns), node.kind);
            found.push((
                self.offset_at(self.row_scope, &pointer, &columns, kind),
                kind,
                cache,
            ));
        }
        found
    }
    /// What a pass does with the elements `at..at + width`; the folds' next values.
    fn body(
        &mut self,
        pass: &Pass,
        at: &str,
        width: u64,
        folds: &[(Fold, Kind)],
        before: &[String],
    ) -> Vec<String> {
        let plan = self.plan;
        if width == self.lanes {
            for (pointer, kind, cache) in self.fetched.clone() {
                let (at, hint) = (self.offset(&pointer, at, kind), 3 - cache);
                self.line(&format!(
                    "\"llvm.intr.prefetch\"({at}) <{{cache = 1 : i32, hint = {hint} : i32, rw = 0 \
                     : i32}}> : (!llvm.ptr) -> ()"
                ));
            }
        }
        let names = self.elements(pass, at, width, BTreeMap::new());
        let mut next = vec![];
        for (f, &(fold, kind)) in folds.iter().enumerate() {
            let x = self.element(plan.dag.nodes[pass.folds[f]].args[0], width, &names);
            next.push(self.combine_two(fold, kind, width, &before[f], &x));
        }
        // All was read that lies where something is written.
        for &id in &pass.keeps {
            let (pointer, align) = self.buffer(id);
            self.store(&names[&id], &pointer, at, plan.dag.kind(id), width, align);
        }
        for &j in &pass.sums {
            let Known::Columns { of, .. } = plan.results[j].known else {
                continue;
            };
            let (kind, x) = (self.sums[&j].kind, self.element(of, width, &names));
            let pointer = format!("%sums{j}");
            let align = self.sum_align(kind);
            let old = self.load(&pointer, at, kind, width, align);
            let new = self.combine_two(Fold::Sum, kind, width, &old, &x);
            self.store(&new, &pointer, at, kind, width, align);
        }
        for &j in &pass.stores {
            let Known::Node(id) = plan.results[j].known else {
                continue;
            };
            let x = self.element(id, width, &names);
            self.store_result(j, id, &x, at, width);
        }
        next
    }
    fn store_result(&mut self, j: usize, id: Id, x: &str, at: &str, width: u64) {
        let (kind, memory) = (self.plan.dag.kind(id), self.memory(j));
        let axes = self.plan.space.axes(self.plan.results[j].value);
        let (pointer, align) = self.row_pointer(self.plan.operands.len() + j, axes, memory);
        let x = match kind {
            Kind::I1 => self.def(&format!(
                "arith.extui {x} : {} to {}",
                type_of(kind, width),
                type_of(memory, width)
            )),
            _ => x.to_string(),
        };
        let streamed = 1 < width && self.plan.streams(j);
        self.fenced |= streamed;
        self.store_as(
            if streamed { ", nontemporal" } else { "" },
            &x,
            &pointer,
            at,
            memory,
            width,
            align,
        );
    }
    fn memory(&self, j: usize) -> Kind {
        storage(self.plan.results[j].ty.dtype()).unwrap_or(Kind::I8)
    }
    fn sum_align(&self, kind: Kind) -> u64 {
        let most = if self.plan.gpu { 16 } else { 64 };
        let bytes = gcd(self.lanes, self.plan.space.columns()) * kind.bytes();
        (1 << bytes.trailing_zeros()).min(most)
    }

    // --- functions ---

    /// The first phase: all rows, or all elements.
    fn main(&mut self, rows_each: u64, sum_parts: u64) -> Emitted<Function> {
        let symbol = self.begin(0);
        let (rows, columns) = (self.plan.space.rows(), self.plan.space.columns());
        self.stack_buffers();
        let sums = !self.sums.is_empty();
        let folds = self.passes.all.iter().any(|pass| !pass.folds.is_empty());
        let per_part = if self.plan.gpu {
            self.lanes * self.threads * 4
        } else {
            PART
        };
        let parts;
        if sums {
            parts = sum_parts;
            self.parts_loop(parts);
            for (&j, sum) in self.sums {
                let argument = self.plan.operands.len() + self.plan.results.len();
                let (offset, stride) = (self.index(sum.offset), self.index(columns));
                let base = self.offset_at(0, &format!("%a{argument}"), &offset, Kind::I8);
                let at = self.def(&format!("arith.muli %part, {stride} : i64"));
                let ty = self.pointer_type();
                let kind = sum.kind.name();
                self.line(&format!(
                    "%sums{j} = llvm.getelementptr {base}[{at}] : ({ty}, i64) -> {ty}, {kind}"
                ));
                self.zero(j, sum.kind);
            }
            let (each, all, one) = (self.index(rows_each), self.index(rows), self.index(1));
            let from = self.def(&format!("arith.muli %part, {each} : i64"));
            let to = self.def(&format!("arith.addi {from}, {each} : i64"));
            let to = self.def(&format!("arith.minui {to}, {all} : i64"));
            self.open(&format!(
                "scf.for %row = {from} to {to} step {one} : i64 {{"
            ));
            self.rows(&Columns::all(columns, self.lanes));
            self.close();
            self.close();
        } else if !folds && 2 * per_part < columns {
            // Rows are long: a part is a piece of one.
            let pieces = columns.div_ceil(per_part);
            parts = rows * pieces;
            self.parts_loop(parts);
            let (pieces, each, all) = (
                self.index(pieces),
                self.index(per_part),
                self.index(columns),
            );
            let (row, piece) = match rows {
                1 => (self.index(0), "%part".to_string()),
                _ => (
                    self.def(&format!("arith.divui %part, {pieces} : i64")),
                    self.def(&format!("arith.remui %part, {pieces} : i64")),
                ),
            };
            let zero = self.index(0);
            self.line(&format!("%row = arith.addi {row}, {zero} : i64"));
            let from = self.def(&format!("arith.muli {piece}, {each} : i64"));
            let to = self.def(&format!("arith.addi {from}, {each} : i64"));
            let to = self.def(&format!("arith.minui {to}, {all} : i64"));
            let whole = columns / self.lanes * self.lanes;
            let vectors = self.index(whole);
            let end = self.def(&format!("arith.minui {to}, {vectors} : i64"));
            let range = Columns {
                whole: per_part.min(whole),
                rest: whole != columns,
                range: Some((from, end.clone())),
                tail: (end, to),
            };
            self.rows(&range);
            self.close();
        } else {
            let each = if self.plan.gpu && folds {
                1
            } else {
                (per_part / columns.max(1)).max(1)
            };
            parts = rows.div_ceil(each);
            let (each, all, one) = (self.index(each), self.index(rows), self.index(1));
            let (from, to) = if self.plan.gpu {
                self.parts_loop(parts);
                let from = self.def(&format!("arith.muli %part, {each} : i64"));
                let to = self.def(&format!("arith.addi {from}, {each} : i64"));
                (from, to)
            } else {
                let from = self.def(&format!("arith.muli %first, {each} : i64"));
                (from, self.def(&format!("arith.muli %end, {each} : i64")))
            };
            let to = self.def(&format!("arith.minui {to}, {all} : i64"));
            self.open(&format!(
                "scf.for %row = {from} to {to} step {one} : i64 {{"
            ));
            self.rows(&Columns::all(columns, self.lanes));
            self.close();
            if self.plan.gpu {
                self.close();
            }
        }
        Ok(Function {
            symbol,
            parts,
            threads: self.threads as u32,
        })
    }
    /// Makes room for what passes keep and no result has room for.
    fn stack_buffers(&mut self) {
        let stack: Vec<(Id, usize)> = self
            .passes
            .buffers
            .iter()
            .filter_map(|(&id, &buffer)| match buffer {
                Buffer::Stack(n) => Some((id, n)),
                Buffer::Result(_) => None,
            })
            .collect();
        for (id, n) in stack {
            let (size, ty) = (self.index(self.plan.space.columns()), self.pointer_type());
            let kind = self.plan.dag.kind(id).name();
            self.line_at(
                0,
                &format!(
                    "%buffer{n} = llvm.alloca {size} x {kind} {{alignment = 64 : i64}} : \
                    (i64) -> {ty}"
                ),
            );
        }
        if self.passes.blocks.is_some() {
            let blocks = self.index(self.plan.space.columns().div_ceil(BLOCK));
            for name in [BLOCK_SCALES, BLOCK_SUMS] {
                self.line_at(
                    0,
                    &format!("{name} = llvm.alloca {blocks} x f32 : (i64) -> !llvm.ptr"),
                );
            }
        }
    }
    /// Opens the loop over parts: those that the caller asks for, or a block's.
    fn parts_loop(&mut self, parts: u64) {
        let header = match self.plan.gpu {
            true => {
                let parts = self.index(parts);
                format!("scf.for %part = %first to {parts} step %step : i64 {{")
            }
            false => {
                let one = self.index(1);
                format!("scf.for %part = %first to %end step {one} : i64 {{")
            }
        };
        self.open(&header);
    }
    /// Clears a part's sums.
    fn zero(&mut self, j: usize, kind: Kind) {
        let columns = Columns::all(self.plan.space.columns(), self.lanes);
        let align = self.sum_align(kind);
        for (width, from, to) in [
            (self.lanes, 0, columns.whole),
            (1, columns.whole, self.plan.space.columns()),
        ] {
            if from == to {
                continue;
            }
            let (zero, from, to) = (
                self.constant(0, kind, width),
                self.index(from),
                self.index(to),
            );
            let (from, step) = self.shared_loop(&from, width, width);
            self.fold_loop(&from, &to, &step, &[], &[], |e, at, _| {
                e.store(&zero, &format!("%sums{j}"), at, kind, width, align);
                vec![]
            });
        }
    }
    /// One row, in the scope that is open.
    fn rows(&mut self, columns: &Columns) {
        let (plan, passes) = (self.plan, self.passes);
        self.row_scope = self.scopes.len() - 1;
        self.row = "%row".into();
        let mut slots = 0;
        for (p, pass) in passes.all.iter().enumerate() {
            self.fetched.clear();
            let idle = pass.folds.is_empty() && pass.stores.is_empty() && pass.sums.is_empty();
            match passes.blocks.filter(|(first, _)| *first <= p) {
                Some((first, found)) if p == first => {
                    self.largest_and_sum([pass, &passes.all[p + 1]], found)
                }
                Some((first, _)) if p == first + 1 => {}
                Some((_, found)) if pass.kept.contains(&found.e) => self.scaled(pass, found.e),
                _ if idle => {}
                blocks => {
                    if p == 1 && blocks.is_none() {
                        self.fetched = self.next_row(&passes.all[0]);
                    }
                    self.pass(pass, columns, slots);
                }
            }
            slots += pass.folds.len() as u64;
        }
        let singles: Vec<(usize, Id)> = (0..plan.results.len())
            .filter(|&j| !plan.space.span(plan.results[j].value).1)
            .filter_map(|j| match plan.results[j].known {
                Known::Node(id) => Some((j, id)),
                Known::Columns { .. } => None,
            })
            .collect();
        let values: Vec<String> = singles.iter().map(|&(_, id)| self.scalar(id)).collect();
        if plan.gpu && (!singles.is_empty() || slots != 0) {
            // Every thread has read what may lie there, and the shared memory of this row.
            self.line("nvvm.barrier0");
        }
        if singles.is_empty() {
            return;
        }
        // Pieces of a row all know it; the first writes it.
        let zero = self.index(0);
        let mut conditions = vec![];
        if plan.gpu {
            conditions.push(self.def(&format!("arith.cmpi eq, %tid, {zero} : i64")));
        }
        if let Some((from, _)) = &columns.range {
            conditions.push(self.def(&format!("arith.cmpi eq, {from}, {zero} : i64")));
        }
        let condition = conditions
            .into_iter()
            .reduce(|a, b| self.def(&format!("arith.andi {a}, {b} : i1")));
        if let Some(condition) = &condition {
            // Pointers belong to the row, not to the branch.
            for &(j, _) in &singles {
                let memory = self.memory(j);
                self.row_pointer(
                    plan.operands.len() + j,
                    plan.space.axes(plan.results[j].value),
                    memory,
                );
            }
            self.open(&format!("scf.if {condition} {{"));
        }
        for ((j, id), x) in singles.into_iter().zip(values) {
            self.store_result(j, id, &x, &zero, 1);
        }
        if condition.is_some() {
            self.close();
        }
    }
    /// The second phase: the parts' sums, added in order.
    fn combine(&mut self, sums: &[usize], sum_parts: u64) -> Emitted<Function> {
        let symbol = self.begin(1);
        let plan = self.plan;
        let columns = plan.space.columns();
        let each = if plan.gpu {
            self.lanes * self.threads
        } else {
            COMBINED
        };
        let parts = columns.div_ceil(each);
        self.parts_loop(parts);
        let argument = plan.operands.len() + plan.results.len();
        let (size, all) = (self.index(each), self.index(columns));
        let from = self.def(&format!("arith.muli %part, {size} : i64"));
        let to = self.def(&format!("arith.addi {from}, {size} : i64"));
        let to = self.def(&format!("arith.minui {to}, {all} : i64"));
        let whole = columns / self.lanes * self.lanes;
        let vectors = self.index(whole);
        let end = self.def(&format!("arith.minui {to}, {vectors} : i64"));
        for &j in sums {
            let Known::Columns { divisor, .. } = plan.results[j].known else {
                continue;
            };
            let (kind, offset) = (self.sums[&j].kind, self.index(self.sums[&j].offset));
            let base = self.offset_at(0, &format!("%a{argument}"), &offset, Kind::I8);
            let align = self.sum_align(kind);
            let memory = self.memory(j);
            let widths = [
                (self.lanes, from.clone(), end.clone()),
                (1, end.clone(), to.clone()),
            ];
            for (width, from, to) in widths {
                if (width == 1) == (whole == columns) && width == 1 || (width != 1 && whole == 0) {
                    continue;
                }
                let (from, step) = self.shared_loop(&from, width, width);
                let base = base.clone();
                self.fold_loop(&from, &to, &step, &[], &[], |e, at, _| {
                    let (zero, parts, one) = (e.index(0), e.index(sum_parts), e.index(1));
                    let start = e.constant(0, kind, width);
                    let total = e.fold_loop(
                        &zero,
                        &parts,
                        &one,
                        &[start],
                        &[type_of(kind, width)],
                        |e, p, before| {
                            let stride = e.index(columns);
                            let row = e.def(&format!("arith.muli {p}, {stride} : i64"));
                            let place = e.def(&format!("arith.addi {row}, {at} : i64"));
                            let x = e.load(&base, &place, kind, width, align);
                            vec![e.combine_two(Fold::Sum, kind, width, &before[0], &x)]
                        },
                    );
                    let x = e.finish_sum(j, &total[0], divisor, kind, width);
                    let result = format!("%a{}", plan.operands.len() + j);
                    let align = (e.lanes * memory.bytes()).min(if plan.gpu { 16 } else { 64 });
                    e.store(&x, &result, at, memory, width, align);
                    vec![]
                });
            }
        }
        self.close();
        Ok(Function {
            symbol,
            parts,
            threads: self.threads as u32,
        })
    }
    /// A sum as its result's element.
    fn finish_sum(
        &mut self,
        j: usize,
        x: &str,
        divisor: Option<u64>,
        kind: Kind,
        width: u64,
    ) -> String {
        let ty = type_of(kind, width);
        let mut x = x.to_string();
        if let Some(n) = divisor {
            let bits = if kind == Kind::F32 {
                (n as f32).to_bits().into()
            } else {
                (n as f64).to_bits()
            };
            let n = self.constant(bits, kind, width);
            x = self.def(&format!("arith.divf {x}, {n} : {ty}"));
        }
        let dtype = self.plan.results[j].ty.dtype();
        let memory = self.memory(j);
        let to = type_of(memory, width);
        match dtype {
            ir::DType::BF16 => {
                let mut dag = Dag::new(Functions::Polynomials);
                let load = dag.load(
                    0,
                    0,
                    Kind::F32,
                    super::dag::Span {
                        rows: false,
                        columns: true,
                    },
                );
                let rounded = dag.rounded_bf16(load);
                self.apart(&dag, load, &x, rounded, width)
            }
            ir::DType::F16 => self.def(&format!("arith.truncf {x} : {ty} to {to}")),
            _ if memory == kind => x,
            _ => self.def(&format!("arith.trunci {x} : {ty} to {to}")),
        }
    }
    /// Instructions of another graph, of one value.
    fn apart(&mut self, dag: &Dag, from: Id, x: &str, to: Id, width: u64) -> String {
        let mut names: BTreeMap<Id, String> = BTreeMap::from([(from, x.to_string())]);
        for (id, node) in dag.nodes.iter().enumerate() {
            if id == from {
                continue;
            }
            let name = match node.prim {
                Prim::Const(bits) => self.constant(bits, node.kind, width),
                _ => {
                    let args: Vec<String> = node.args.iter().map(|a| names[a].clone()).collect();
                    let text = instruction_text(dag, id, &args, width);
                    self.def(&text)
                }
            };
            names.insert(id, name);
        }
        names[&to].clone()
    }
}

/// Which columns a pass goes over: as many whole vectors, and the rest one by one.
struct Columns {
    /// Elements in whole vectors, if it is all of the row; at most so many, if it is a piece.
    whole: u64,
    rest: bool,
    /// A piece: where its vectors begin and end, and where the rest does.
    range: Option<(String, String)>,
    tail: (String, String),
}

impl Columns {
    fn all(columns: u64, lanes: u64) -> Columns {
        let whole = columns / lanes * lanes;
        Columns {
            whole,
            rest: whole != columns,
            range: None,
            tail: Default::default(),
        }
    }
}

fn type_of(kind: Kind, width: u64) -> String {
    if width == 1 {
        kind.name().into()
    } else {
        format!("vector<{width}x{}>", kind.name())
    }
}
fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}
/// One instruction's text.
fn instruction_text(dag: &Dag, id: Id, args: &[String], width: u64) -> String {
    let node = &dag.nodes[id];
    let ty = type_of(node.kind, width);
    let of = |i: usize| type_of(dag.kind(node.args[i]), width);
    let list = args.join(", ");
    match &node.prim {
        Prim::Same(Arith::Exp2) => format!("math.exp2 {list} fastmath<afn> : {ty}"),
        Prim::Same(op) => format!("{} {list} : {ty}", op.name()),
        Prim::Compare(by) => format!("{} {}, {list} : {}", by.op(), by.name(), of(0)),
        Prim::Select if width == 1 => format!("arith.select {list} : {ty}"),
        Prim::Select => format!("arith.select {list} : {}, {ty}", of(0)),
        Prim::Convert(how) => format!("{} {list} : {} to {ty}", how.name(), of(0)),
        other => unreachable!("{other:?} should be emitted by itself"),
    }
}

/// 16 bytes of the narrowest that is read or written for each element.
fn gpu_lanes(plan: &Plan<'_>) -> u64 {
    let loads = plan
        .dag
        .nodes
        .iter()
        .filter(|node| node.span.columns && matches!(node.prim, Prim::Load(..)));
    let results = plan
        .results
        .iter()
        .filter(|out| plan.space.span(out.value).1);
    let bytes = loads
        .map(|node| node.kind.bytes())
        .chain(results.map(|out| out.ty.dtype().bytes()));
    let narrowest = bytes.filter(|&b| 1 < b).min().unwrap_or(4);
    (16 / narrowest).clamp(2, 8)
}
/// As many threads as a row keeps busy.
fn gpu_threads(plan: &Plan<'_>, lanes: u64) -> u64 {
    plan.space
        .columns()
        .div_ceil(lanes)
        .next_power_of_two()
        .clamp(32, 256)
}
