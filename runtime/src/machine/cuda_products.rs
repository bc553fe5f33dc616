//! Launches of products that cuBLASLt computes.
//!
//! The library is looked for when a machine is made. It computes a product in place of the
//! artifact's own kernel if it can. The algorithm of each shape is chosen once, when a step is
//! loaded, and kept in a file: so restarts, budgets and addresses change no bits. The file has the
//! library's version and the GPU's name in its first line, and counts only for these.

use super::backend::Launch;
use crate::Error;
use crate::cuda::{
    Addend, Algorithm, Device, DeviceRange, DriverError, Number, Places, Product, ProductError,
    Products as Library, Refused, Shape,
};
use artifact::{Attr, DType, Operand, replace_file};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Names of the library, the newest first.
const NAMES: [&str; 2] = ["libcublasLt.so.13", "libcublasLt.so.12"];
/// Names another file, or is 0.
const VARIABLE: &str = "LIGHTERAGE_CUBLASLT";

/// What computes products on a GPU.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub enum ProductLibrary {
    /// cuBLASLt if it is found by its name, else the artifact's kernels. With a driver that is
    /// named, which may be none of NVIDIA's, the artifact's kernels.
    #[default]
    Found,
    /// cuBLASLt from this file.
    At(PathBuf),
    /// The artifact's kernels.
    Own,
}

impl ProductLibrary {
    /// What the environment says.
    pub(super) fn of_environment() -> ProductLibrary {
        match std::env::var_os(VARIABLE) {
            Some(value) if value == "0" => ProductLibrary::Own,
            Some(value) if !value.is_empty() => ProductLibrary::At(value.into()),
            _ => ProductLibrary::Found,
        }
    }
}

/// The library, if there is one, and the algorithms of shapes.
#[derive(Default)]
pub(super) struct Products {
    library: Option<Library>,
    /// Why there is no library.
    missing: Option<String>,
    device: String,
    file: Option<PathBuf>,
    algorithms: BTreeMap<String, Algorithm>,
    /// Whether the file lacks some of them.
    is_new: bool,
    /// Launches that the library computes, and other products.
    counts: [usize; 2],
    /// Whether factors of f32 may be rounded to TF32.
    tf32: bool,
}

/// Loads what is asked for; without it, why.
fn open(
    device: &Device,
    which: &ProductLibrary,
    other_driver: bool,
) -> Result<Result<Library, Option<String>>, Error> {
    match which {
        ProductLibrary::Own => Ok(Err(None)),
        ProductLibrary::At(path) => match Library::open(device, path) {
            Ok(library) => Ok(Ok(library)),
            Err(why) => Err(Error::Unsupported(format!(
                "{why}; {VARIABLE}=0 computes products without cuBLASLt"
            ))),
        },
        ProductLibrary::Found if other_driver => Ok(Err(None)),
        ProductLibrary::Found => {
            let mut reasons = vec![];
            for name in NAMES {
                match Library::open(device, Path::new(name)) {
                    Ok(library) => return Ok(Ok(library)),
                    Err(ProductError::Driver(error)) => {
                        return Err(Error::Unsupported(error.to_string()));
                    }
                    Err(why) => reasons.push(why.to_string()),
                }
            }
            Ok(Err(reasons.into_iter().next()))
        }
    }
}

impl Products {
    pub(super) fn new(
        device: &Device,
        which: &ProductLibrary,
        other_driver: bool,
        (file, tf32): (Option<&Path>, bool),
    ) -> Result<Products, Error> {
        let (library, missing) = match open(device, which, other_driver)? {
            Ok(library) => (Some(library), None),
            Err(missing) => (None, missing),
        };
        let mut products = Products {
            library,
            missing,
            device: device.name().into(),
            file: file.map(Path::to_path_buf),
            tf32,
            ..Products::default()
        };
        products.read();
        Ok(products)
    }

    /// The first line of a file of algorithms.
    fn head(&self) -> Option<String> {
        let version = self.library.as_ref()?.version();
        Some(format!("cublaslt {version} {}", self.device))
    }

    /// Reads the algorithms of an earlier run by the same library.
    fn read(&mut self) {
        let (Some(head), Some(file)) = (self.head(), &self.file) else {
            return;
        };
        let text = std::fs::read_to_string(file).unwrap_or_default();
        let mut lines = text.lines();
        if lines.next() == Some(&head) {
            self.algorithms = lines.filter_map(parsed).collect();
        }
    }

    /// Keeps what was chosen for the next run. A folder that cannot be written is no error: the
    /// choice is made again.
    pub(super) fn save(&mut self) {
        let (Some(head), Some(file), true) = (self.head(), &self.file, self.is_new) else {
            return;
        };
        let mut text = head + "\n";
        for (key, words) in &self.algorithms {
            let words = words.map(|word| format!(" {word:016x}")).concat();
            text += &format!("{key}{words}\n");
        }
        let _ = replace_file(file, &[text.as_bytes()]);
        self.is_new = false;
    }

    /// The library's part of a launch; `None` if it computes no such thing.
    pub(super) fn product(
        &mut self,
        (op, attrs): (&str, &[(String, Attr)]),
        launch: &Launch<'_>,
        address: impl Fn(usize) -> u64,
        workspace: Option<DeviceRange>,
    ) -> Result<Option<(Product, Operands)>, DriverError> {
        let Some((mut shape, operands)) = found(op, attrs, launch) else {
            return Ok(None);
        };
        let Some(library) = &self.library else {
            self.counts[1] += 1;
            return Ok(None);
        };
        shape.tf32 = self.tf32 && shape.factors == Number::F32;
        shape.workspace = workspace.map_or(0, |range| range.bytes());
        let places = Places {
            left: address(operands.left),
            right: address(operands.right),
            addend: operands.addend.map_or(0, &address),
            result: address(launch.ins.len()),
        };
        let key = key(&shape);
        let known = self.algorithms.get(&key).copied();
        let product = library.product(&shape, places, workspace, known)?;
        self.counts[usize::from(product.is_none())] += 1;
        if let Some(product) = &product
            && known != Some(*product.algorithm())
        {
            self.algorithms.insert(key, *product.algorithm());
            self.is_new = true;
        }
        Ok(product.map(|product| (product, operands)))
    }

    /// What computes products, for people.
    pub(super) fn note(&self) -> Option<String> {
        let [theirs, own] = self.counts;
        match (&self.library, &self.missing) {
            (Some(library), _) if theirs > 0 => Some(format!(
                "cuBLASLt {} of {} computes {theirs} of {} products",
                library.version(),
                library.path().display(),
                theirs + own
            )),
            (None, Some(why)) if own > 0 => Some(format!(
                "products run on kernels of Lighterage, which are slower than cuBLASLt's: {why}; \
                 {VARIABLE} names another file"
            )),
            _ => None,
        }
    }
}

/// Which operands of a launch are a product's factors and its addend.
#[derive(Clone, Copy)]
pub(super) struct Operands {
    left: usize,
    right: usize,
    addend: Option<usize>,
}

impl Operands {
    /// Has a product find an operand at an address from now on.
    pub(super) fn point(
        &self,
        product: &mut Product,
        operand: usize,
        to: u64,
    ) -> Result<(), Refused> {
        let mut places = product.places();
        match operand {
            i if i == self.left => places.left = to,
            i if i == self.right => places.right = to,
            i if Some(i) == self.addend => places.addend = to,
            _ => places.result = to,
        }
        product.point(places)
    }
}

fn number(dtype: DType) -> Option<Number> {
    match dtype {
        DType::F32 => Some(Number::F32),
        DType::BF16 => Some(Number::BF16),
        _ => None,
    }
}

/// The last two sizes of a tensor, and the product of those before them.
fn matrices(operand: &Operand) -> Option<(u64, [u64; 2])> {
    let (lead, last) = operand.shape.split_last_chunk::<2>()?;
    Some((lead.iter().product(), *last))
}

/// The shape and the operands of a launch that may be the library's.
fn found(op: &str, attrs: &[(String, Attr)], launch: &Launch<'_>) -> Option<(Shape, Operands)> {
    let (first, addend) = match (op, launch.ins.len()) {
        ("matmul", 2) | ("matmul_sum", 2) => (0, None),
        ("addmm", 3) => (1, Some(0)),
        ("matmul_sum", 3) => (0, Some(2)),
        _ => return None,
    };
    let flag = |name: &str| {
        let found = attrs.iter().find(|(key, _)| key == name);
        matches!(found, Some((_, Attr::Bool(true))))
    };
    let (ta, tb) = (flag("ta"), flag("tb"));
    let [x, w] = [&launch.ins[first], &launch.ins[first + 1]];
    let result = launch.outs.first()?;
    let (batch, [m, n]) = matrices(result)?;
    let ((x_batch, x_sizes), (w_batch, _)) = (matrices(x)?, matrices(w)?);
    let k = x_sizes[usize::from(!ta)];
    let is_empty = [batch, m, n, k].contains(&0);
    if is_empty || x_batch != batch || w_batch != batch || x.dtype != w.dtype {
        return None;
    }
    let added = match addend.map(|i| &launch.ins[i]) {
        None => Addend::Nothing,
        Some(c) if c.dtype != result.dtype => return None,
        Some(c) if c.shape == result.shape => Addend::Matrix,
        Some(c) if c.shape == [n] && batch == 1 => Addend::Bias,
        Some(_) => return None,
    };
    // Sizes of the library's layouts.
    let is_small = [batch, m, n, k].into_iter().all(|size| size < 1 << 31);
    let factors = number(x.dtype)?;
    let result = number(result.dtype)?;
    // The library has no product of f32 with a result of bf16.
    let has_types = factors == Number::BF16 || result == Number::F32;
    let shape = Shape {
        batch,
        m,
        n,
        k,
        ta,
        tb,
        tf32: false,
        factors,
        result,
        addend: added,
        workspace: 0,
    };
    let operands = Operands {
        left: first,
        right: first + 1,
        addend,
    };
    (is_small && has_types).then_some((shape, operands))
}

/// A shape as one word.
fn key(s: &Shape) -> String {
    let Shape {
        batch,
        m,
        n,
        k,
        ta,
        tb,
        tf32,
        factors,
        result,
        addend,
        workspace,
    } = s;
    let rounded = if *tf32 { "-tf32" } else { "" };
    let sides = [ta, tb].map(|&t| if t { 't' } else { 'n' });
    format!(
        "{factors:?}-{result:?}-{addend:?}-{}{}-{batch}x{m}x{n}x{k}-{workspace}{rounded}",
        sides[0], sides[1]
    )
}

/// A line of a file of algorithms.
fn parsed(line: &str) -> Option<(String, Algorithm)> {
    let mut words = line.split(' ');
    let key = words.next()?.to_string();
    let mut algorithm = Algorithm::default();
    for word in &mut algorithm {
        *word = u64::from_str_radix(words.next()?, 16).ok()?;
    }
    words.next().is_none().then_some((key, algorithm))
}
