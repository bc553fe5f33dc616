//! Operands and attributes for any op, from its declaration and its shape rule, so that tests of
//! every op need no list of them.

use ir::op::{Access, Attr, Elements, Kind, Misfit, Op, OpKind, attributes};
use ir::{DType, TensorType};

/// Every op of which `holds` is true.
pub fn ops_that(holds: impl Fn(OpKind) -> bool) -> Vec<OpKind> {
    let all = OpKind::ALL.iter().copied();
    all.filter(|&op| holds(op)).collect()
}

/// True if a generated kernel computes the op by itself. Reshapes and similar ops have no kernel.
pub fn is_generated(op: OpKind) -> bool {
    op.facts().may_be_generated() && op.facts().has_kernel
}
/// True for functions of one operand, element by element, without attributes.
pub fn is_function(op: OpKind) -> bool {
    let facts = op.facts();
    is_elementwise(op) && facts.inputs == (1, 1) && !facts.inplace.is_empty() && has_keys(op, &[])
}
/// True for functions of two operands that broadcast, element by element.
pub fn is_binary(op: OpKind) -> bool {
    is_elementwise(op) && op.facts().inputs == (2, 2) && op.facts().broadcasts
}
/// True for functions of an operand and a number.
pub fn takes_a_number(op: OpKind) -> bool {
    is_elementwise(op) && op.facts().inputs == (1, 1) && has_keys(op, &["value"])
}
/// True for reductions over dimensions.
pub fn is_reduction(op: OpKind) -> bool {
    op.facts().access == Access::Row && has_keys(op, &["dims", "keepdim"])
}
/// True for updates of parameters.
pub fn is_update(op: OpKind) -> bool {
    is_elementwise(op) && op.facts().options_from.is_some()
}
/// True for ops of which an operand has indices, so that random numbers do not fit.
pub fn reads_indices(op: OpKind) -> bool {
    matches!(op, OpKind::NllLossBwd)
}
fn is_elementwise(op: OpKind) -> bool {
    op.facts().access == Access::Element
}
fn has_keys(op: OpKind, keys: &[&str]) -> bool {
    let found = attributes(op).iter().map(|&(key, _)| key);
    found.eq(keys.iter().copied())
}

/// An op with attributes and only the required operands, based on `x`. `None` if no such operands
/// are found, or if its attributes are text or a body.
pub fn example(kind: OpKind, x: &TensorType) -> Option<(Op, Vec<TensorType>)> {
    let attrs = attributes(kind).iter();
    let attrs = attrs.map(|&(key, kind)| Some((key.to_string(), attr(key, kind, x)?)));
    let op = Op::of(kind, attrs.collect::<Option<_>>()?).expect("attributes should be the op's");
    let types = fitting(&op, vec![x.clone(); kind.facts().inputs.0])?;
    Some((op, types))
}

/// An attribute that fits operands of the type of `x`, for most ops.
fn attr(key: &str, kind: Kind, x: &TensorType) -> Option<Attr> {
    let last = x.rank() as i64 - 1;
    Some(match (key, kind) {
        ("dim", Kind::Int) => Attr::Int(last),
        ("dims", Kind::Ints) => Attr::Ints(vec![last]),
        ("mask", Kind::Ints) => Attr::Ints(vec![1; 3]),
        (_, Kind::Ints) => Attr::Ints(x.shape().iter().map(|&d| d as i64).collect()),
        (_, Kind::Int) => Attr::Int(1),
        ("min", Kind::Number) => Attr::Float(-2.0),
        (_, Kind::Number) => Attr::Float(2.0),
        (_, Kind::Float) => Attr::Float(0.5),
        (_, Kind::Bool) => Attr::Bool(true),
        (_, Kind::Type) => Attr::Type(DType::BF16),
        (_, Kind::Str | Kind::Body) => return None,
    })
}

/// The op along each single dimension of its first operand, if it has such an attribute and its
/// shape rule accepts this; else the op as it is.
pub fn along_each_dimension(op: Op, types: &[TensorType]) -> Vec<Op> {
    let operands: Vec<&TensorType> = types.iter().collect();
    let along = |dim: i64| {
        let changed = op.attrs().into_iter().map(|(key, attr)| match (key, attr) {
            ("dim", Attr::Int(_)) => (key, Attr::Int(dim)),
            ("dims", Attr::Ints(_)) => (key, Attr::Ints(vec![dim])),
            unchanged => unchanged,
        });
        Op::new(op.name(), changed).expect("the attributes should be the op's")
    };
    let rank = types.first().map_or(0, TensorType::rank) as i64;
    let all = (0..rank)
        .map(along)
        .filter(|op| op.infer(&operands).is_ok());
    let mut distinct: Vec<Op> = vec![];
    for op in all {
        if !distinct.contains(&op) {
            distinct.push(op);
        }
    }
    match distinct.is_empty() {
        true => vec![op],
        false => distinct,
    }
}

/// The operands, changed by the messages of the op's shape rule until they fit. `None` if a message
/// does not say how.
pub fn fitting(op: &Op, mut types: Vec<TensorType>) -> Option<Vec<TensorType>> {
    // A rule reports one misfit at a time, and at most three for each operand.
    for _ in 0..=3 * types.len() {
        match op.infer(&types.iter().collect::<Vec<_>>()) {
            Ok(_) => return Some(types),
            Err(error) if repair(&mut types, &error.kind) => {}
            Err(_) => return None,
        }
    }
    None
}

/// Changes operands as a shape rule requires. False if the rule says only that they do not fit.
pub fn repair(types: &mut [TensorType], misfit: &Misfit) -> bool {
    match misfit {
        &Misfit::ElementType { operand, wanted } => retype(&mut types[operand], wanted),
        &Misfit::NoIndex { operand } => retype(&mut types[operand], DType::I64),
        Misfit::NoKernel {
            wanted: Elements::Bits,
            ..
        } => types.iter_mut().for_each(|ty| retype(ty, DType::I32)),
        &Misfit::Types { operands: (i, j) } => types[i.max(j)] = types[i.min(j)].clone(),
        &Misfit::ElementTypes { operands: (i, j) } => {
            let to = types[i.min(j)].dtype();
            retype(&mut types[i.max(j)], to);
        }
        Misfit::Shape { operand, wanted } => {
            let ty = TensorType::new(types[*operand].dtype(), wanted.clone());
            types[*operand] = ty.expect("a shape that a rule wants should be a tensor's");
        }
        Misfit::Type { operand, wanted } => types[*operand] = wanted.clone(),
        _ => return false,
    }
    true
}

/// Gives a type other elements.
pub fn retype(ty: &mut TensorType, dtype: DType) {
    *ty = TensorType::new(dtype, ty.shape()).expect("the shape should be small");
}
