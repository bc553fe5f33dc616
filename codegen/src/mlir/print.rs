//! Modules as MLIR text.

use super::builder::{
    Block, Body, Cache, Factors, For, Function, Inst, Layout, Module, Op, Parameter, Shared, Step,
    Value, While,
};
use super::{Kind, Space, Type};
use std::fmt::{self, Display, Formatter, Write};

impl Display for Module {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.write_str("module {\n")?;
        for function in &self.functions {
            if let Some(shared) = &function.shared {
                global(f, shared)?;
            }
            Printer { f, function }.function()?;
        }
        f.write_str("}\n")
    }
}

fn global(f: &mut Formatter<'_>, shared: &Shared) -> fmt::Result {
    let Shared {
        symbol,
        bytes,
        align,
        dynamic,
    } = shared;
    let linkage = if *dynamic { "external" } else { "internal" };
    let bytes = if *dynamic { 0 } else { *bytes };
    writeln!(
        f,
        "  llvm.mlir.global {linkage} @{symbol}() \
         {{addr_space = 3 : i32, alignment = {align} : i64}} : !llvm.array<{bytes} x i8>"
    )
}

/// Prints one function.
struct Printer<'a, 'b> {
    f: &'a mut Formatter<'b>,
    function: &'a Function,
}

impl Printer<'_, '_> {
    fn function(&mut self) -> fmt::Result {
        write!(self.f, "  llvm.func @{}(", self.function.symbol)?;
        for (i, parameter) in self.function.parameters.iter().enumerate() {
            if i != 0 {
                self.f.write_str(", ")?;
            }
            self.parameter(parameter)?;
        }
        self.f.write_str(") attributes {")?;
        match self.function.body {
            Body::Cpu => self
                .f
                .write_str("passthrough = [\"nounwind\", [\"prefer-vector-width\", \"512\"]]")?,
            Body::Gpu { threads, blocks } => write!(
                self.f,
                "nvvm.kernel, nvvm.maxntid = array<i32: {threads}, 1, 1>, \
                 nvvm.minctasm = {blocks} : i32"
            )?,
        }
        self.f.write_str("} {\n")?;
        self.block(&self.function.block, 2)?;
        self.f.write_str("    llvm.return\n  }\n")
    }

    fn parameter(&mut self, parameter: &Parameter) -> fmt::Result {
        write!(self.f, "%{}: {}", parameter.name, parameter.ty)?;
        let mut known = vec![];
        known.extend(parameter.align.map(|n| format!("llvm.align = {n} : i64")));
        known.extend(parameter.noalias.then(|| "llvm.noalias".into()));
        known.extend(parameter.readonly.then(|| "llvm.readonly".into()));
        if known.is_empty() {
            return Ok(());
        }
        write!(self.f, " {{{}}}", known.join(", "))
    }

    fn block(&mut self, block: &Block, depth: usize) -> fmt::Result {
        for op in &block.ops {
            self.indent(depth)?;
            self.op(op, depth)?;
            self.f.write_char('\n')?;
        }
        if !block.yields.is_empty() {
            self.indent(depth)?;
            let (values, types) = (self.list(&block.yields), types(&block.yields));
            writeln!(self.f, "scf.yield {values} : {types}")?;
        }
        Ok(())
    }

    fn indent(&mut self, depth: usize) -> fmt::Result {
        write!(self.f, "{:1$}", "", 2 * depth)
    }

    fn name(&self, value: Value) -> String {
        match self.function.parameters.get(value.id as usize) {
            Some(parameter) => format!("%{}", parameter.name),
            None => format!("%{}", value.id),
        }
    }

    fn list(&self, values: &[Value]) -> String {
        let names: Vec<String> = values.iter().map(|&value| self.name(value)).collect();
        names.join(", ")
    }

    fn op(&mut self, op: &Op, depth: usize) -> fmt::Result {
        if !op.results.is_empty() {
            let results = self.list(&op.results);
            write!(self.f, "{results} = ")?;
        }
        match &op.inst {
            Inst::For(inner) => self.repeat(inner, depth),
            Inst::While(inner) => self.repeat_while(inner, depth),
            Inst::If {
                condition,
                then,
                otherwise,
            } => {
                let condition = self.name(*condition);
                write!(self.f, "scf.if {condition} ")?;
                if !op.results.is_empty() {
                    write!(self.f, "-> ({}) ", types(&op.results))?;
                }
                self.f.write_str("{\n")?;
                self.block(then, depth + 1)?;
                if let Some(otherwise) = otherwise {
                    self.indent(depth)?;
                    self.f.write_str("} else {\n")?;
                    self.block(otherwise, depth + 1)?;
                }
                self.indent(depth)?;
                self.f.write_char('}')
            }
            inst => {
                let text = self.simple(inst, op.results.first().copied());
                self.f.write_str(&text)
            }
        }
    }

    fn repeat(&mut self, inner: &For, depth: usize) -> fmt::Result {
        let [from, to, step] = inner.bounds.map(|bound| self.name(bound));
        let at = self.name(inner.at);
        write!(self.f, "scf.for {at} = {from} to {to} step {step} ")?;
        if !inner.starts.is_empty() {
            let pair =
                |(&carried, &start)| format!("{} = {}", self.name(carried), self.name(start));
            let pairs: Vec<String> = inner.carried.iter().zip(&inner.starts).map(pair).collect();
            let (pairs, types) = (pairs.join(", "), types(&inner.starts));
            write!(self.f, "iter_args({pairs}) -> ({types}) ")?;
        }
        writeln!(self.f, ": {} {{", inner.at.ty)?;
        self.block(&inner.body, depth + 1)?;
        self.indent(depth)?;
        // LLVM and ptxas would unroll loops until registers run out.
        self.f.write_str(if inner.rolled {
            "} {llvm.loop_annotation = #llvm.loop_annotation<unroll = <disable = true>>}"
        } else {
            "}"
        })
    }

    fn repeat_while(&mut self, inner: &While, depth: usize) -> fmt::Result {
        let pair = |(&compared, &start)| format!("{} = {}", self.name(compared), self.name(start));
        let pairs: Vec<String> = inner.compared.iter().zip(&inner.starts).map(pair).collect();
        let (pairs, types) = (pairs.join(", "), types(&inner.starts));
        writeln!(self.f, "scf.while ({pairs}) : ({types}) -> ({types}) {{")?;
        let (first, goes_on) = (inner.compared[0], format!("%on{}", inner.compared[0].id));
        let (op, how, args) = (inner.by.op(), inner.by.name(), [first, inner.limit]);
        self.indent(depth + 1)?;
        writeln!(
            self.f,
            "{goes_on} = {op} {how}, {} : {}",
            self.list(&args),
            first.ty
        )?;
        self.indent(depth + 1)?;
        let compared = self.list(&inner.compared);
        writeln!(self.f, "scf.condition({goes_on}) {compared} : {types}")?;
        self.indent(depth)?;
        self.f.write_str("} do {\n")?;
        self.indent(depth)?;
        let argument = |&value: &Value| format!("{}: {}", self.name(value), value.ty);
        let arguments: Vec<String> = inner.carried.iter().map(argument).collect();
        writeln!(self.f, "^bb0({}):", arguments.join(", "))?;
        self.block(&inner.body, depth + 1)?;
        self.indent(depth)?;
        self.f.write_char('}')
    }

    /// An operation on one line.
    fn simple(&self, inst: &Inst, result: Option<Value>) -> String {
        let ty = result.map_or(Type::Scalar(Kind::I1), Value::ty);
        match inst {
            Inst::Constant(bits) => constant(*bits, ty),
            Inst::Constants(numbers) => {
                format!("arith.constant dense<[{}]> : {ty}", join(numbers))
            }
            Inst::Arith(op, args) => {
                let flags = op.fastmath();
                let flags = flags.map_or(String::new(), |flags| format!(" fastmath<{flags}>"));
                format!("{} {}{flags} : {ty}", op.name(), self.list(args))
            }
            Inst::Compare(by, args) => {
                let (op, how, list) = (by.op(), by.name(), self.list(args));
                format!("{op} {how}, {list} : {}", args[0].ty)
            }
            Inst::Select(args) => {
                let (list, condition) = (self.list(args), args[0].ty);
                if let Type::Vector(..) = condition {
                    format!("arith.select {list} : {condition}, {ty}")
                } else {
                    format!("arith.select {list} : {ty}")
                }
            }
            Inst::Convert(how, x) => self.cast(how.name(), *x, ty),
            Inst::Broadcast(x) => self.cast("vector.broadcast", *x, ty),
            Inst::VectorBitcast(x) => self.cast("vector.bitcast", *x, ty),
            Inst::Bitcast(x) => self.cast("llvm.bitcast", *x, ty),
            Inst::Extract(x, at) => {
                format!(
                    "vector.extract {}[{at}] : {ty} from {}",
                    self.name(*x),
                    x.ty
                )
            }
            Inst::Insert([x, into], at) => {
                let (name, vector) = (self.name(*x), self.name(*into));
                format!("vector.insert {name}, {vector} [{at}] : {} into {ty}", x.ty)
            }
            Inst::Slice(x, at) => {
                let size = if let Type::Vector(n, _) = ty { n } else { 1 };
                format!(
                    "vector.extract_strided_slice {} {{offsets = [{at}], sizes = [{size}], \
                     strides = [1]}} : {} to {ty}",
                    self.name(*x),
                    x.ty
                )
            }
            Inst::Shuffle(args, order) => {
                let (list, order) = (self.list(args), join(order));
                format!("vector.shuffle {list} [{order}] : {}", types(args))
            }
            Inst::Undef => format!("llvm.mlir.undef : {ty}"),
            _ => self.memory(inst, ty),
        }
    }

    fn cast(&self, op: &str, x: Value, to: Type) -> String {
        format!("{op} {} : {} to {to}", self.name(x), x.ty)
    }

    fn memory(&self, inst: &Inst, ty: Type) -> String {
        match inst {
            Inst::Offset {
                pointer,
                step,
                unit,
            } => {
                let (name, of) = (self.name(*pointer), pointer.ty);
                let (at, operand) = match step {
                    Step::Known(n) => (n.to_string(), ""),
                    Step::By(by) => (self.name(*by), ", i64"),
                };
                format!("llvm.getelementptr {name}[{at}] : ({of}{operand}) -> {of}, {unit}")
            }
            Inst::Load { pointer, align } => {
                let align = align.map_or(String::new(), |n| format!(" {{alignment = {n} : i64}}"));
                let (name, of) = (self.name(*pointer), pointer.ty);
                format!("llvm.load {name}{align} : {of} -> {ty}")
            }
            Inst::Store {
                x,
                pointer,
                align,
                nontemporal,
            } => {
                let how = if *nontemporal { ", nontemporal" } else { "" };
                let (name, to) = (self.name(*x), self.name(*pointer));
                let (from, at) = (x.ty, pointer.ty);
                format!("llvm.store {name}, {to} {{alignment = {align} : i64{how}}} : {from}, {at}")
            }
            Inst::Alloca { n, kind, align } => {
                let align = align.map_or(String::new(), |n| format!("{{alignment = {n} : i64}} "));
                let (n, kind) = (self.name(*n), kind.name());
                format!("llvm.alloca {n} x {kind} {align}: (i64) -> {ty}")
            }
            Inst::Shared => {
                let symbol = self.function.shared.as_ref().map_or("", |s| &s.symbol);
                format!("llvm.mlir.addressof @{symbol} : {ty}")
            }
            Inst::Prefetch { pointer, locality } => {
                let (name, of) = (self.name(*pointer), pointer.ty);
                format!(
                    "\"llvm.intr.prefetch\"({name}) <{{cache = 1 : i32, hint = {locality} : i32, \
                     rw = 0 : i32}}> : ({of}) -> ()"
                )
            }
            Inst::Fence => "llvm.fence seq_cst".into(),
            _ => self.gpu(inst, ty),
        }
    }

    fn gpu(&self, inst: &Inst, ty: Type) -> String {
        match inst {
            Inst::Special(which) => format!("{} : {ty}", which.name()),
            Inst::Barrier => "nvvm.barrier0".into(),
            Inst::WarpBarrier(all) => {
                format!("nvvm.bar.warp.sync {} : {}", self.name(*all), all.ty)
            }
            Inst::Butterfly(args) => {
                format!("nvvm.shfl.sync bfly {} : {ty} -> {ty}", self.list(args))
            }
            Inst::CopyAsync {
                to,
                from,
                bytes,
                valid,
                cache,
            } => {
                let cache = match cache {
                    Cache::All => "ca",
                    Cache::Second => "cg",
                };
                format!(
                    "nvvm.cp.async.shared.global {}, {bytes}, cache = {cache}, {} : {}",
                    self.list(&[*to, *from]),
                    self.name(*valid),
                    types(&[*to, *from, *valid])
                )
            }
            Inst::Commit => "nvvm.cp.async.commit.group".into(),
            Inst::WaitAll => "nvvm.cp.async.wait.group 0".into(),
            Inst::LoadMatrices(row, layout) => {
                let layout = match layout {
                    Layout::Rows => "row",
                    Layout::Columns => "col",
                };
                let shared = Type::Pointer(Space::Shared);
                format!(
                    "nvvm.ldmatrix {} {{num = 4 : i32, layout = #nvvm.mma_layout<{layout}>, \
                     shape = #nvvm.ld_st_matrix_shape<m = 8, n = 8>, \
                     eltType = #nvvm.ld_st_matrix_elt_type<b16>}} : ({shared}) -> {ty}",
                    self.name(*row)
                )
            }
            Inst::Multiply { factors, a, b, c } => {
                let (number, k) = match factors {
                    Factors::Bf16 => ("bf16", 16),
                    Factors::Tf32 => ("tf32", 8),
                };
                format!(
                    "nvvm.mma.sync A[{}] B[{}] C[{}] {{layoutA = #nvvm.mma_layout<row>, \
                     layoutB = #nvvm.mma_layout<col>, \
                     multiplicandAPtxType = #nvvm.mma_type<{number}>, \
                     multiplicandBPtxType = #nvvm.mma_type<{number}>, \
                     shape = #nvvm.shape<m = 16, n = 8, k = {k}>}} : (i32, i32, f32) -> {ty}",
                    self.list(a),
                    self.list(b),
                    self.list(c)
                )
            }
            Inst::Field(x, at) => format!("llvm.extractvalue {}[{at}] : {}", self.name(*x), x.ty),
            Inst::Intrinsic(which, args) => {
                let (list, types) = (self.list(args), types(args));
                let name = which.name();
                format!("llvm.call_intrinsic \"{name}\"({list}) : ({types}) -> {ty}")
            }
            other => unreachable!("{other:?} should be printed as a block or on a line"),
        }
    }
}

fn types(values: &[Value]) -> String {
    let types: Vec<String> = values.iter().map(|value| value.ty.to_string()).collect();
    types.join(", ")
}

fn join(numbers: &[u64]) -> String {
    let numbers: Vec<String> = numbers.iter().map(u64::to_string).collect();
    numbers.join(", ")
}

/// The text of a constant with these bits in each element.
fn constant(bits: u64, ty: Type) -> String {
    let kind = ty.kind().unwrap_or(Kind::I64);
    let value = match kind {
        Kind::I1 => (bits != 0).to_string(),
        Kind::I8 => (bits as i8).to_string(),
        Kind::I16 => (bits as i16).to_string(),
        Kind::I32 => (bits as i32).to_string(),
        Kind::I64 => (bits as i64).to_string(),
        Kind::BF16 | Kind::F16 => format!("0x{bits:04X}"),
        Kind::F32 => format!("0x{bits:08X}"),
        Kind::F64 => format!("0x{bits:016X}"),
    };
    match ty {
        Type::Scalar(Kind::I1) => format!("arith.constant {value}"),
        Type::Vector(..) => format!("arith.constant dense<{value}> : {ty}"),
        _ => format!("arith.constant {value} : {ty}"),
    }
}
