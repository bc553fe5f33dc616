//! The parts of the JSON in a .pt2 file that a reader needs: schema version 8 of
//! `torch._export.serde.schema`. Other fields are skipped, so minor versions may add some.

use ir::DType;
use serde::de::{Deserializer, IgnoredAny, MapAccess, Visitor};
use serde::{Deserialize, de};
use std::collections::BTreeMap;
use std::fmt;

/// `models/model.json`
#[derive(Deserialize)]
pub(crate) struct ExportedProgram {
    pub(crate) graph_module: GraphModule,
    #[serde(default)]
    pub(crate) range_constraints: BTreeMap<String, Range>,
}

/// This is read before the rest: other major versions have other fields.
#[derive(Deserialize)]
pub(crate) struct Header {
    pub(crate) schema_version: SchemaVersion,
    #[serde(default)]
    pub(crate) torch_version: String,
}

#[derive(Deserialize)]
pub(crate) struct SchemaVersion {
    pub(crate) major: i64,
    pub(crate) minor: i64,
}

/// Bounds of a symbol. Floats, because Python's integers may exceed 64 bits here.
#[derive(Deserialize)]
pub(crate) struct Range {
    pub(crate) min_val: Option<f64>,
    pub(crate) max_val: Option<f64>,
}

#[derive(Deserialize)]
pub(crate) struct GraphModule {
    pub(crate) graph: Graph,
    pub(crate) signature: Signature,
}

#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Graph {
    /// Operands, of a graph inside another one.
    #[serde(default)]
    pub(crate) inputs: Vec<Argument>,
    /// Results, of a graph inside another one.
    #[serde(default)]
    pub(crate) outputs: Vec<Argument>,
    pub(crate) nodes: Vec<Node>,
    pub(crate) tensor_values: BTreeMap<String, TensorMeta>,
    #[serde(default)]
    pub(crate) sym_int_values: BTreeMap<String, SymInt>,
}

#[derive(Deserialize)]
pub(crate) struct Signature {
    pub(crate) input_specs: Vec<InputSpec>,
    pub(crate) output_specs: Vec<OutputSpec>,
}

#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Node {
    pub(crate) target: String,
    pub(crate) inputs: Vec<NamedArgument>,
    pub(crate) outputs: Vec<Argument>,
    #[serde(default)]
    pub(crate) metadata: Metadata,
    #[serde(default)]
    pub(crate) name: Option<String>,
    /// In `torch.no_grad()`: no gradient passes what the call writes.
    #[serde(skip)]
    pub(crate) is_detached: bool,
}

#[derive(Clone, Debug, Deserialize, Default)]
pub(crate) struct Metadata {
    /// JSON in a string.
    #[serde(default)]
    pub(crate) custom: Option<String>,
    /// The modules around the call, outermost first: `KEY,PATH,CLASS;..`.
    #[serde(default)]
    pub(crate) nn_module_stack: Option<String>,
}

#[derive(Clone, Debug, Deserialize)]
pub(crate) struct NamedArgument {
    pub(crate) name: String,
    pub(crate) arg: Argument,
}

#[derive(Clone, Debug, Deserialize)]
pub(crate) struct TensorMeta {
    pub(crate) dtype: i64,
    pub(crate) sizes: Vec<SymInt>,
    pub(crate) strides: Vec<SymInt>,
    pub(crate) storage_offset: SymInt,
    pub(crate) layout: i64,
    /// False for a frozen parameter.
    #[serde(default)]
    pub(crate) requires_grad: Option<bool>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum SymInt {
    AsInt(i64),
    AsExpr(SymExpr),
}

#[derive(Clone, Debug, Deserialize)]
pub(crate) struct SymExpr {
    /// In the format of sympy's `srepr`.
    pub(crate) expr_str: String,
    #[serde(default)]
    pub(crate) hint: Option<Hint>,
}

/// The value of a symbol while the model was traced.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Hint {
    #[serde(default)]
    pub(crate) as_int: Option<i64>,
}

#[derive(Deserialize)]
pub(crate) struct Name {
    pub(crate) name: String,
}

/// `data/weights/model_weights_config.json`
#[derive(Deserialize)]
pub(crate) struct PayloadConfig {
    pub(crate) config: BTreeMap<String, Payload>,
}

#[derive(Deserialize)]
pub(crate) struct Payload {
    pub(crate) path_name: String,
    pub(crate) use_pickle: bool,
    pub(crate) tensor_meta: Option<TensorMeta>,
}

/// The parts of `extra/joint_step.json` that are read.
#[derive(Deserialize)]
pub(crate) struct JointStep {
    #[serde(default)]
    pub(crate) tied: Vec<Vec<String>>,
}

/// The element type of the parts of complex numbers, by the type's number in the schema.
pub(crate) fn part(number: i64) -> Option<DType> {
    match number {
        10 => Some(DType::F32),
        11 => Some(DType::F64),
        _ => None,
    }
}

/// An element type by its number in the schema. Complex types (see [`part`]), `u16` and the `fnuz`
/// types have no counterpart.
pub(crate) fn dtype(number: i64) -> Option<DType> {
    Some(match number {
        1 => DType::U8,
        2 => DType::I8,
        3 => DType::I16,
        4 => DType::I32,
        5 => DType::I64,
        6 => DType::F16,
        7 => DType::F32,
        8 => DType::F64,
        12 => DType::Bool,
        13 => DType::BF16,
        29 => DType::F8E4M3,
        30 => DType::F8E5M2,
        _ => return None,
    })
}

/// The number of the strided layout, the only one that is read.
pub(crate) const STRIDED: i64 = 7;

/// An entry of a list of sizes or tensors.
#[derive(Clone, Debug)]
pub(crate) enum Item {
    Int(i64),
    /// A tensor or a symbolic integer.
    Name(String),
    None,
}

/// An argument or result of a node: a union with one key.
#[derive(Clone, Debug)]
pub(crate) enum Argument {
    None,
    Tensor(String),
    /// Tensors, some of which may be absent.
    Tensors(Vec<Item>),
    Int(i64),
    /// Integers, some of which may be symbolic.
    Ints(Vec<Item>),
    Float(f64),
    Floats(Vec<f64>),
    Complex(Complex),
    Bool(bool),
    Bools(Vec<bool>),
    String(String),
    SymInt(String),
    ScalarType(i64),
    Layout(i64),
    /// A graph inside the graph.
    Region(Box<Graph>),
    /// Something that none of our ops accepts: a device, a memory format, an object.
    Other,
}

/// A complex number.
#[derive(Clone, Copy, Debug, Deserialize)]
pub(crate) struct Complex {
    pub(crate) real: f64,
    pub(crate) imag: f64,
}

/// A graph with its name.
#[derive(Deserialize)]
struct Region {
    graph: Graph,
}

/// A number, or the string for a number that JSON cannot write.
#[derive(Deserialize)]
#[serde(untagged)]
enum Float {
    Number(f64),
    Text(String),
}

impl Float {
    fn value<E: de::Error>(self) -> Result<f64, E> {
        match self {
            Float::Number(x) => Ok(x),
            Float::Text(text) => match text.as_str() {
                "Infinity" => Ok(f64::INFINITY),
                "-Infinity" => Ok(f64::NEG_INFINITY),
                "NaN" => Ok(f64::NAN),
                _ => Err(E::custom(format!("{text:?} is not a number"))),
            },
        }
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum SymIntArgument {
    AsName(String),
    AsInt(i64),
}

impl SymIntArgument {
    fn item(self) -> Item {
        match self {
            SymIntArgument::AsName(name) => Item::Name(name),
            SymIntArgument::AsInt(i) => Item::Int(i),
        }
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum OptionalTensor {
    AsTensor(Name),
    AsNone(IgnoredAny),
}

impl OptionalTensor {
    fn item(self) -> Item {
        match self {
            OptionalTensor::AsTensor(tensor) => Item::Name(tensor.name),
            OptionalTensor::AsNone(_) => Item::None,
        }
    }
}

impl<'de> Deserialize<'de> for Argument {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Argument, D::Error> {
        struct Union;
        impl<'de> Visitor<'de> for Union {
            type Value = Argument;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an argument: an object with one key")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Argument, A::Error> {
                let key: String = map
                    .next_key()?
                    .ok_or_else(|| de::Error::custom("an argument should have a key"))?;
                let argument = match key.as_str() {
                    "as_none" => map.next_value::<IgnoredAny>().map(|_| Argument::None)?,
                    "as_tensor" => Argument::Tensor(map.next_value::<Name>()?.name),
                    "as_tensors" => {
                        let names: Vec<Name> = map.next_value()?;
                        Argument::Tensors(names.into_iter().map(|n| Item::Name(n.name)).collect())
                    }
                    "as_optional_tensors" => {
                        let list: Vec<OptionalTensor> = map.next_value()?;
                        Argument::Tensors(list.into_iter().map(OptionalTensor::item).collect())
                    }
                    "as_optional_tensor" => match map.next_value::<OptionalTensor>()?.item() {
                        Item::Name(name) => Argument::Tensor(name),
                        _ => Argument::None,
                    },
                    "as_int" => Argument::Int(map.next_value()?),
                    "as_ints" => {
                        let list: Vec<i64> = map.next_value()?;
                        Argument::Ints(list.into_iter().map(Item::Int).collect())
                    }
                    "as_sym_int" => match map.next_value::<SymIntArgument>()? {
                        SymIntArgument::AsName(name) => Argument::SymInt(name),
                        SymIntArgument::AsInt(i) => Argument::Int(i),
                    },
                    "as_sym_ints" => {
                        let list: Vec<SymIntArgument> = map.next_value()?;
                        Argument::Ints(list.into_iter().map(SymIntArgument::item).collect())
                    }
                    "as_float" => Argument::Float(map.next_value::<Float>()?.value()?),
                    "as_floats" => {
                        let list: Vec<Float> = map.next_value()?;
                        let list: Result<_, _> = list.into_iter().map(Float::value).collect();
                        Argument::Floats(list?)
                    }
                    "as_complex" => Argument::Complex(map.next_value()?),
                    "as_bool" => Argument::Bool(map.next_value()?),
                    "as_bools" => Argument::Bools(map.next_value()?),
                    "as_string" => Argument::String(map.next_value()?),
                    "as_scalar_type" => Argument::ScalarType(map.next_value()?),
                    "as_graph" => Argument::Region(Box::new(map.next_value::<Region>()?.graph)),
                    "as_layout" => Argument::Layout(map.next_value()?),
                    _ => map.next_value::<IgnoredAny>().map(|_| Argument::Other)?,
                };
                match map.next_key::<IgnoredAny>()? {
                    None => Ok(argument),
                    Some(_) => Err(de::Error::custom("an argument should have one key")),
                }
            }
        }
        deserializer.deserialize_map(Union)
    }
}

/// An input of a graph.
#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum InputSpec {
    UserInput {
        arg: Argument,
    },
    Parameter {
        arg: Name,
        parameter_name: String,
    },
    Buffer {
        arg: Name,
        buffer_name: String,
    },
    TensorConstant {
        arg: Name,
        tensor_constant_name: String,
    },
    CustomObj(IgnoredAny),
    Token(IgnoredAny),
    ConstantInput(IgnoredAny),
}

/// An output of a graph.
#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum OutputSpec {
    UserOutput { arg: Argument },
    LossOutput { arg: Name },
    BufferMutation { arg: Name, buffer_name: String },
    ParameterMutation { arg: Name, parameter_name: String },
    GradientToParameter { arg: Name, parameter_name: String },
    GradientToUserInput { arg: Name, user_input_name: String },
    UserInputMutation { arg: Name, user_input_name: String },
    Token(IgnoredAny),
}
