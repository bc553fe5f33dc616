//! Symbolic sizes: the values of symbols and of expressions with symbols.
//!
//! An expression has the format of sympy's `srepr`, as in `Mul(Integer(32), Symbol('s72',
//! positive=True, integer=True))`. It is evaluated while it is read, with fractions, because sympy
//! writes half of an even size as a product with 1/2.

use crate::Error;
use crate::schema::{ExportedProgram, Range, SymInt};
use std::collections::{BTreeMap, BTreeSet};

/// The values of a file's symbols.
pub(crate) struct Symbols<'a> {
    dims: &'a BTreeMap<String, u64>,
    ranges: &'a BTreeMap<String, Range>,
    /// Named integers, and expressions that have been evaluated.
    named: &'a BTreeMap<String, SymInt>,
    known: BTreeMap<&'a str, i64>,
}

/// A file's information about its sizes.
struct Sizes<'a> {
    /// Expressions, with their values while the model was traced.
    expressions: BTreeMap<&'a str, Option<i64>>,
    ranges: &'a BTreeMap<String, Range>,
    /// The symbols in them.
    used: BTreeSet<&'a str>,
}

impl<'a> Sizes<'a> {
    fn of(program: &'a ExportedProgram) -> Sizes<'a> {
        let graph = &program.graph_module.graph;
        let ranges = &program.range_constraints;
        let sizes = graph
            .tensor_values
            .values()
            .flat_map(|meta| &meta.sizes)
            .chain(graph.sym_int_values.values());
        let expressions: BTreeMap<&str, Option<i64>> = sizes
            .filter_map(|size| match size {
                SymInt::AsExpr(e) => {
                    Some((e.expr_str.as_str(), e.hint.as_ref().and_then(|h| h.as_int)))
                }
                SymInt::AsInt(_) => None,
            })
            .collect();
        let mut used = BTreeSet::new();
        for text in expressions.keys() {
            used.extend(symbols_of(text));
        }
        // A symbol that begins with `u` is a number that depends on the data; tensors that need it
        // are refused.
        used.retain(|symbol| !is_data_dependent(symbol));
        Sizes {
            expressions,
            ranges,
            used,
        }
    }

    fn list(&self) -> String {
        let one = |symbol: &&str| format!("{symbol} in {}", range_text(self.ranges.get(*symbol)));
        self.used.iter().map(one).collect::<Vec<_>>().join(", ")
    }

    /// Checks that each symbol with a given value is in the file.
    fn check_known(&self, dims: &BTreeMap<String, u64>) -> Result<(), Error> {
        let is_unknown = |symbol: &&String| !self.used.contains(symbol.as_str());
        let Some(symbol) = dims.keys().find(is_unknown) else {
            return Ok(());
        };
        let known = if self.used.is_empty() {
            "it has none".into()
        } else {
            format!("it has {}", self.list())
        };
        let message = format!("has no symbolic size {symbol}; {known}");
        Err(Error::new("", message))
    }

    /// Checks that each symbol of the file has a given value.
    fn check_given(&self, dims: &BTreeMap<String, u64>) -> Result<(), Error> {
        let missing = self.used.iter().filter(|s| !dims.contains_key(**s));
        let choices: Vec<String> = missing
            .map(|symbol| format!("--dim {symbol}={}", self.traced(symbol)))
            .collect();
        if choices.is_empty() {
            return Ok(());
        }
        let message = format!("has symbolic sizes: {}", self.list());
        Err(Error::new("", message).help(format!("choose with {}", choices.join(" "))))
    }

    /// The value of a symbol while the model was traced, else the smallest allowed value.
    fn traced(&self, symbol: &str) -> i64 {
        let mut bare = self.expressions.iter();
        let hint = bare
            .find(|&(text, _)| bare_symbol(text) == Some(symbol))
            .and_then(|(_, hint)| *hint);
        let least = self.ranges.get(symbol).and_then(|range| range.min_val);
        hint.unwrap_or(least.map_or(1, |min| min as i64))
    }

    /// Checks that each value is within its range.
    fn check_ranges(&self, dims: &BTreeMap<String, u64>) -> Result<(), Error> {
        for (symbol, &value) in dims {
            let Some(range) = self.ranges.get(symbol) else {
                continue;
            };
            let low = range.min_val.is_none_or(|min| min <= value as f64);
            let high = range.max_val.is_none_or(|max| value as f64 <= max);
            if !low || !high {
                let message = format!("{symbol}={value} is not in {}", range_text(Some(range)));
                return Err(Error::new("", message).help("export with a wider range to allow it"));
            }
        }
        Ok(())
    }
}

impl<'a> Symbols<'a> {
    /// Checks that every symbol which `program` uses has a value in `dims`, within its range.
    pub(crate) fn new(
        program: &'a ExportedProgram,
        dims: &'a BTreeMap<String, u64>,
    ) -> Result<Symbols<'a>, Error> {
        let file = Sizes::of(program);
        file.check_known(dims)?;
        file.check_given(dims)?;
        file.check_ranges(dims)?;
        Ok(Symbols {
            dims,
            ranges: &program.range_constraints,
            named: &program.graph_module.graph.sym_int_values,
            known: BTreeMap::new(),
        })
    }

    /// The names of the symbols that `program` uses.
    pub(crate) fn names(program: &ExportedProgram) -> Vec<String> {
        let used = Sizes::of(program).used;
        used.into_iter().map(str::to_string).collect()
    }

    /// The value of a size.
    pub(crate) fn size(&mut self, size: &'a SymInt) -> Result<i64, String> {
        let text = match size {
            &SymInt::AsInt(i) => return Ok(i),
            SymInt::AsExpr(e) => e.expr_str.as_str(),
        };
        if let Some(&value) = self.known.get(text) {
            return Ok(value);
        }
        let mut parser = Parser {
            text,
            at: 0,
            symbols: self,
        };
        let value = parser
            .whole()
            .map_err(|e| format!("size {}: {e}", shortened(text)))?;
        self.known.insert(text, value);
        Ok(value)
    }

    /// The value of a named integer.
    pub(crate) fn named(&mut self, name: &str) -> Result<i64, String> {
        let size = self
            .named
            .get(name)
            .ok_or_else(|| format!("there is no integer {name}"))?;
        self.size(size)
    }

    fn symbol(&self, symbol: &str) -> Result<i64, String> {
        if is_data_dependent(symbol) {
            return Err(format!(
                "{symbol} depends on the data of each step; memory cannot be planned for it, so \
                 use a formulation \
                 with fixed sizes (masks instead of selections)"
            ));
        }
        let value = self.dims.get(symbol).ok_or_else(|| {
            format!(
                "symbol {symbol} in {} has no value",
                range_text(self.ranges.get(symbol))
            )
        })?;
        i64::try_from(*value).map_err(|_| format!("{symbol}={value} is too large"))
    }
}

fn is_data_dependent(symbol: &str) -> bool {
    symbol.starts_with('u')
}

/// The names of the symbols in an expression.
fn symbols_of(text: &str) -> impl Iterator<Item = &str> {
    text.split("Symbol('")
        .skip(1)
        .filter_map(|rest| rest.split('\'').next())
}

/// The symbol that an expression consists of.
fn bare_symbol(text: &str) -> Option<&str> {
    text.strip_prefix("Symbol('")?.split('\'').next()
}

fn range_text(range: Option<&Range>) -> String {
    // Bounds near 2^63 mean infinity.
    let bound = |bound: Option<f64>| bound.filter(|b| b.abs() < 9e15).map(|b| format!("{b}"));
    let (min, max) = range.map_or((None, None), |r| (bound(r.min_val), bound(r.max_val)));
    format!(
        "{}..{}",
        min.unwrap_or_default(),
        max.map_or(String::new(), |max| format!("={max}"))
    )
}

fn shortened(text: &str) -> String {
    match text.char_indices().nth(80) {
        Some((end, _)) => format!("{}..", &text[..end]),
        None => text.to_string(),
    }
}

/// A fraction in lowest terms; the denominator is positive.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Fraction {
    over: i128,
    under: i128,
}

impl Fraction {
    fn new(over: i128, under: i128) -> Result<Fraction, String> {
        let (mut a, mut b) = (over, under);
        while b != 0 {
            (a, b) = (b, a % b);
        }
        // The sign of the divisor makes the denominator positive.
        let divisor = if (a < 0) == (under < 0) { a } else { -a };
        if under == 0 {
            return Err("division by zero".into());
        }
        let (over, under) = (over / divisor, under / divisor);
        // Within these bounds no product of two overflows.
        let fits = over.abs() < 1 << 62 && under < 1 << 62;
        if fits {
            Ok(Fraction { over, under })
        } else {
            Err("is too large".into())
        }
    }
    fn times(self, other: Fraction) -> Result<Fraction, String> {
        Fraction::new(self.over * other.over, self.under * other.under)
    }
    fn plus(self, other: Fraction) -> Result<Fraction, String> {
        let over = (self.over * other.under)
            .checked_add(other.over * self.under)
            .ok_or("is too large")?;
        Fraction::new(over, self.under * other.under)
    }
    fn inverse(self) -> Result<Fraction, String> {
        Fraction::new(self.under, self.over)
    }
    fn floor(self) -> i128 {
        self.over.div_euclid(self.under)
    }
    fn less(self, other: Fraction) -> bool {
        self.over * other.under < other.over * self.under
    }
}

/// A position in an expression.
struct Parser<'t, 's> {
    text: &'t str,
    at: usize,
    symbols: &'s Symbols<'s>,
}

/// Deeper than any expression that sympy writes for a size, and shallow enough for every stack.
const MAX_DEPTH: u32 = 64;

impl<'t> Parser<'t, '_> {
    fn whole(&mut self) -> Result<i64, String> {
        let value = self.expression(0)?;
        if self.at != self.text.len() {
            return Err(self.unexpected("the end"));
        }
        if value.under != 1 {
            return Err("is not a whole number for these dimensions".into());
        }
        i64::try_from(value.over).map_err(|_| "is too large".into())
    }
    fn unexpected(&self, expected: &str) -> String {
        format!("{expected} should stand at character {}", self.at)
    }
    /// Skips `token` if it comes next.
    fn skip(&mut self, token: &str) -> bool {
        let found = self.text[self.at..].starts_with(token);
        if found {
            self.at += token.len();
        }
        found
    }
    /// The longest prefix of characters that satisfy `f`.
    fn take(&mut self, f: fn(char) -> bool) -> &'t str {
        let rest = &self.text[self.at..];
        let end = rest.find(|c| !f(c)).unwrap_or(rest.len());
        self.at += end;
        &rest[..end]
    }
    fn expression(&mut self, depth: u32) -> Result<Fraction, String> {
        if MAX_DEPTH <= depth {
            return Err("is nested too deeply".into());
        }
        let name = self.take(|c| c.is_ascii_alphanumeric() || c == '_' || c == '.');
        if !self.skip("(") {
            return Err(self.unexpected("a function's name and `(`"));
        }
        match name {
            "Symbol" => {
                let open = self.skip("'");
                let symbol = self.take(|c| c != '\'' && c != ')');
                if !open || !self.skip("'") {
                    return Err(self.unexpected("a quoted name"));
                }
                // Assumptions: `, positive=True, integer=True`.
                self.take(|c| c != ')');
                self.close()?;
                Fraction::new(self.symbols.symbol(symbol)?.into(), 1)
            }
            "Integer" => {
                let value = self.integer()?;
                self.close()?;
                Fraction::new(value, 1)
            }
            "Rational" => {
                let over = self.integer()?;
                if !self.skip(", ") {
                    return Err(self.unexpected("`, `"));
                }
                let under = self.integer()?;
                self.close()?;
                Fraction::new(over, under)
            }
            _ => {
                let mut args = vec![];
                loop {
                    args.push(self.expression(depth + 1)?);
                    if !self.skip(", ") {
                        break;
                    }
                }
                self.close()?;
                apply(name.rsplit('.').next().unwrap_or(name), &args)
            }
        }
    }
    fn close(&mut self) -> Result<(), String> {
        if self.skip(")") {
            Ok(())
        } else {
            Err(self.unexpected("`)`"))
        }
    }
    fn integer(&mut self) -> Result<i128, String> {
        let text = self.take(|c| c.is_ascii_digit() || c == '-');
        let value: i64 = text.parse().map_err(|_| self.unexpected("an integer"))?;
        Ok(value.into())
    }
}

/// A function of torch.utils._sympy.functions, or of sympy itself.
fn apply(name: &str, args: &[Fraction]) -> Result<Fraction, String> {
    let whole = |x: Fraction| {
        if x.under == 1 {
            Ok(x.over)
        } else {
            Err("takes a fraction where it should not".to_string())
        }
    };
    match (name, args) {
        ("Add", [first, rest @ ..]) => rest.iter().try_fold(*first, |sum, &x| sum.plus(x)),
        ("Mul", [first, rest @ ..]) => rest.iter().try_fold(*first, |product, &x| product.times(x)),
        ("Max", [first, rest @ ..]) => Ok(rest
            .iter()
            .fold(*first, |max, &x| if max.less(x) { x } else { max })),
        ("Min", [first, rest @ ..]) => Ok(rest
            .iter()
            .fold(*first, |min, &x| if x.less(min) { x } else { min })),
        ("Pow" | "PowByNatural", &[base, exponent]) => {
            let exponent = whole(exponent)?;
            if exponent.abs() > 64 {
                return Err("has a power above 64".into());
            }
            let power = (0..exponent.abs())
                .try_fold(Fraction::new(1, 1)?, |product, _| product.times(base))?;
            if exponent < 0 {
                power.inverse()
            } else {
                Ok(power)
            }
        }
        ("FloorDiv", &[a, b]) => Fraction::new(a.times(b.inverse()?)?.floor(), 1),
        ("CleanDiv" | "IntTrueDiv", &[a, b]) => a.times(b.inverse()?),
        ("CeilDiv", &[a, b]) => {
            let quotient = a.times(b.inverse()?)?;
            Fraction::new(-Fraction::new(-quotient.over, quotient.under)?.floor(), 1)
        }
        ("FloorToInt" | "floor", &[a]) => Fraction::new(a.floor(), 1),
        ("CeilToInt" | "ceiling", &[a]) => {
            Fraction::new(-Fraction::new(-a.over, a.under)?.floor(), 1)
        }
        ("ToFloat" | "Identity", &[a]) => Ok(a),
        ("Mod" | "PythonMod", &[a, b]) => {
            let (a, b) = (whole(a)?, whole(b)?);
            if b <= 0 {
                Err("has a remainder by a number below 1".into())
            } else {
                Fraction::new(a.rem_euclid(b), 1)
            }
        }
        ("ModularIndexing", &[a, b, c]) => {
            let (quotient, c) = (a.times(b.inverse()?)?.floor(), whole(c)?);
            if c <= 0 {
                Err("has a remainder by a number below 1".into())
            } else {
                Fraction::new(quotient.rem_euclid(c), 1)
            }
        }
        _ => Err(format!(
            "the function {} of {} numbers is not known",
            shortened(name),
            args.len()
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value(text: &str) -> Result<i64, String> {
        let (dims, ranges, named) = (
            BTreeMap::from([("s0".to_string(), 6)]),
            BTreeMap::new(),
            BTreeMap::new(),
        );
        let symbols = Symbols {
            dims: &dims,
            ranges: &ranges,
            named: &named,
            known: BTreeMap::new(),
        };
        Parser {
            text,
            at: 0,
            symbols: &symbols,
        }
        .whole()
    }

    #[test]
    fn expressions_have_values() {
        let s0 = "Symbol('s0', positive=True, integer=True)";
        assert_eq!(value(s0), Ok(6));
        assert_eq!(
            value(&format!("Add(Mul(Integer(32), {s0}), Integer(-1))")),
            Ok(191)
        );
        assert_eq!(value(&format!("Mul(Rational(1, 2), {s0})")), Ok(3));
        assert_eq!(value(&format!("FloorDiv({s0}, Integer(4))")), Ok(1));
        assert_eq!(value(&format!("CeilDiv({s0}, Integer(4))")), Ok(2));
        assert_eq!(value(&format!("Mod({s0}, Integer(4))")), Ok(2));
        assert_eq!(value(&format!("Max({s0}, Integer(4), Integer(9))")), Ok(9));
        assert_eq!(
            value(&format!(
                "torch.utils._sympy.functions.FloorDiv(Pow({s0}, Integer(2)), Integer(-5))"
            )),
            Ok(-8)
        );
        assert_eq!(
            value(&format!("Mul(Integer(6), Pow({s0}, Integer(-1)))")),
            Ok(1)
        );
    }

    #[test]
    fn broken_expressions_are_refused() {
        let deep = format!(
            "{}Integer(1){}",
            "Add(".repeat(100_000),
            ")".repeat(100_000)
        );
        let huge = format!("Pow({}, Integer(64))", "Integer(9223372036854775807)");
        for text in [
            "",
            "Integer(",
            "Integer(1))",
            "Integer(x)",
            "Symbol(s0)",
            "Symbol('s1')",
            "Symbol('u0')",
            "Add()",
        ] {
            assert!(value(text).is_err(), "{text}");
        }
        for text in [
            "Pow(Integer(0), Integer(-1))",
            "Rational(1, 0)",
            "Rational(1, 2)",
            "Sqrt(Integer(4))",
            &deep,
            &huge,
        ] {
            assert!(value(text).is_err(), "{}", shortened(text));
        }
    }
}
