//! Sums of products by Einstein's notation: each dimension of the operands has a letter.

use crate::{Call, Error, Indexed, Ref, Result, Scalar, count, ensure};
use ir::op::OpKind;

/// A tensor whose dimensions have letters.
struct Lettered {
    x: Ref,
    letters: Vec<char>,
}

/// The letters that stand for the dimensions of an ellipsis, from the last one on.
const HIDDEN: [char; 8] = ['0', '1', '2', '3', '4', '5', '6', '7'];

/// One operand's letters; an ellipsis stands for as many dimensions as are left.
fn letters(text: &str, rank: usize) -> Result<Vec<char>> {
    let (before, after) = text.split_once("...").unwrap_or((text, ""));
    let is_letter = |c: char| c.is_ascii_alphabetic();
    ensure(
        before.chars().chain(after.chars()).all(is_letter),
        "the equation is damaged",
    )?;
    let named = before.len() + after.len();
    let hidden = if text.contains("...") {
        rank.checked_sub(named)
    } else {
        Some(0)
    };
    let hidden = hidden.filter(|&n| n <= HIDDEN.len() && named + n == rank);
    let hidden = hidden.ok_or("the equation does not fit the operands")?;
    let middle = HIDDEN[..hidden].iter().rev().copied();
    Ok(before.chars().chain(middle).chain(after.chars()).collect())
}

impl Call<'_> {
    /// A sum of products of tensors, by Einstein's notation.
    pub fn einsum(&mut self, equation: &str, operands: &[Ref]) -> Result<Ref> {
        let equation: String = equation.split_whitespace().collect();
        let (left, right) = match equation.split_once("->") {
            Some((left, right)) => (left, Some(right)),
            None => (&equation[..], None),
        };
        let terms: Vec<&str> = left.split(',').collect();
        ensure(
            terms.len() == operands.len(),
            "the equation has another number of operands",
        )?;
        let mut list = vec![];
        for (&x, term) in operands.iter().zip(&terms) {
            let letters = letters(term, self.rank(x))?;
            list.push(diagonal(self, Lettered { x, letters })?);
        }
        let result = result_letters(&terms, right, &list)?;
        let mut list = list.into_iter();
        let mut product = list.next().ok_or("there is no operand")?;
        let mut rest: Vec<Lettered> = list.collect();
        while !rest.is_empty() {
            let next = rest.remove(0);
            let is_needed =
                |l: &char| result.contains(l) || rest.iter().any(|other| other.letters.contains(l));
            product = contract(self, product, next, &is_needed)?;
        }
        let product = summed(self, product, &|l| result.contains(l))?;
        let order: Option<Vec<usize>> = result
            .iter()
            .map(|l| product.letters.iter().position(|other| other == l))
            .collect();
        self.permute(product.x, &order.ok_or("the equation makes a letter up")?)
    }
}

/// The result's letters: as written, else the ellipsis and the letters that stand once, sorted.
fn result_letters(terms: &[&str], right: Option<&str>, operands: &[Lettered]) -> Result<Vec<char>> {
    let all = || {
        operands
            .iter()
            .flat_map(|operand| operand.letters.iter().copied())
    };
    let hidden = all().filter(|l| HIDDEN.contains(l)).max();
    let n_hidden = hidden.map_or(0, |l| HIDDEN.iter().position(|h| *h == l).unwrap_or(0) + 1);
    let right = match right {
        Some(right) => right.to_string(),
        None => {
            let text: String = terms.concat();
            let stands_once = |l: &char| text.matches(*l).count() == 1;
            let mut once: Vec<char> = all().filter(|l| !HIDDEN.contains(l)).collect();
            once.retain(stands_once);
            once.sort_unstable();
            let start = if n_hidden > 0 { "..." } else { "" };
            [start.to_string(), once.into_iter().collect()].concat()
        }
    };
    let named = right.replace("...", "").len();
    let rank = if right.contains("...") {
        named + n_hidden
    } else {
        named
    };
    letters(&right, rank)
}

/// A letter that stands twice takes the diagonal.
fn diagonal(c: &mut Call<'_>, mut it: Lettered) -> Result<Lettered> {
    loop {
        let twice = (0..it.letters.len()).find_map(|i| {
            let later = it.letters[i + 1..].iter().position(|l| *l == it.letters[i]);
            later.map(|j| (i, i + 1 + j))
        });
        let Some((i, j)) = twice else { return Ok(it) };
        let shape = c.shape_of(it.x);
        ensure(
            shape[i] == shape[j],
            "the equation does not fit the operands",
        )?;
        let at = c.arange(ir::DType::I64, shape[i], Scalar::Int(0), Scalar::Int(1))?;
        let mut indices = vec![None; j + 1];
        (indices[i], indices[j]) = (Some(at), Some(at));
        let indexed = Indexed::new(c, it.x, &indices)?;
        let y = indexed.get(c)?;
        // The diagonal is at the place of the first, if they are neighbours; else it comes first.
        it.letters.remove(j);
        if j != i + 1 {
            let letter = it.letters.remove(i);
            it.letters.insert(0, letter);
        }
        it.x = y;
    }
}

/// Sums over the letters that nothing needs.
fn summed(c: &mut Call<'_>, it: Lettered, needed: &dyn Fn(&char) -> bool) -> Result<Lettered> {
    let dims: Vec<usize> = (0..it.letters.len())
        .filter(|&d| !needed(&it.letters[d]))
        .collect();
    let x = c.reduce(OpKind::Sum, it.x, &dims, false)?;
    let letters = it.letters.into_iter().filter(needed).collect();
    Ok(Lettered { x, letters })
}

/// The product of two tensors, summed over the letters that nothing needs: a batch of products of
/// matrices.
fn contract(
    c: &mut Call<'_>,
    a: Lettered,
    b: Lettered,
    needed: &dyn Fn(&char) -> bool,
) -> Result<Lettered> {
    let a = summed(c, a, &|l| needed(l) || b.letters.contains(l))?;
    let b = summed(c, b, &|l| needed(l) || a.letters.contains(l))?;
    let both = |l: &&char| b.letters.contains(l);
    let list = |it: &mut dyn Iterator<Item = &char>| it.copied().collect::<Vec<char>>();
    let batch = list(&mut a.letters.iter().filter(both).filter(|l| needed(l)));
    let inner = list(&mut a.letters.iter().filter(both).filter(|l| !needed(l)));
    let rows = list(&mut a.letters.iter().filter(|l| !both(l)));
    let columns = list(&mut b.letters.iter().filter(|l| !a.letters.contains(l)));
    let (a, b) = broadcast(c, a, b)?;
    let (x, x_sizes) = grouped(c, &a, [&batch, &rows, &inner])?;
    let (y, y_sizes) = grouped(c, &b, [&batch, &inner, &columns])?;
    let product = c.product(x, y)?;
    let shape = [&x_sizes[0][..], &x_sizes[1], &y_sizes[2]].concat();
    let x = c.reshape(product, &shape)?;
    Ok(Lettered {
        x,
        letters: [batch, rows, columns].concat(),
    })
}

/// Dimensions of size 1 are widened to the size that the other tensor has.
fn broadcast(c: &mut Call<'_>, a: Lettered, b: Lettered) -> Result<(Lettered, Lettered)> {
    let wide = |c: &mut Call<'_>, it: &Lettered, other: &Lettered| {
        let mut shape = c.shape_of(it.x);
        for (size, letter) in shape.iter_mut().zip(&it.letters) {
            let there = other.letters.iter().position(|l| l == letter);
            if let (1, Some(there)) = (*size, there) {
                *size = c.ty(other.x).shape()[there];
            }
        }
        let x = c.expand(it.x, &shape)?;
        Ok::<_, Error>(Lettered {
            x,
            letters: it.letters.clone(),
        })
    };
    Ok((wide(c, &a, &b)?, wide(c, &b, &a)?))
}

/// A tensor as three dimensions, each of several letters, and the sizes of those.
fn grouped(c: &mut Call<'_>, it: &Lettered, groups: [&[char]; 3]) -> Result<(Ref, [Vec<u64>; 3])> {
    let place = |l: &char| it.letters.iter().position(|other| other == l);
    let order: Option<Vec<usize>> = groups
        .iter()
        .flat_map(|group| group.iter().map(place))
        .collect();
    let order = order.ok_or("the equation does not fit the operands")?;
    let shape = c.shape_of(it.x);
    let sizes = groups.map(|group| group.iter().filter_map(place).map(|d| shape[d]).collect());
    let x = c.permute(it.x, &order)?;
    let mut whole = vec![];
    for sizes in &sizes {
        let sizes: &Vec<u64> = sizes;
        whole.push(count(sizes)?);
    }
    Ok((c.reshape(x, &whole)?, sizes))
}
