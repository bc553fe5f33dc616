//! Optimizers, with PyTorch's single-tensor formulas in PyTorch's order, rounded once an element. Coefficients are
//! computed in f64, then rounded to the parameter's wide type.

use super::Ran;
use super::math::{Real, sqrt};
use super::signature::{Checked, Signature, is_float};
use super::strides::count;
use super::wide::{BLOCK, blocks, sink, source, wide_float};
use crate::kernel::Call;
use artifact::DType;

// ------------------------------------------------------------------------------------------------------------ checks

fn check_hyper(s: &Signature<'_>, i: usize, n: u64) -> Checked {
    s.expect(i, DType::F64)?;
    s.expect_shape(i, &[n])
}
pub(super) fn check_adamw(s: &Signature<'_>) -> Checked {
    s.has_kernel(0, is_float)?;
    for i in 1..4 {
        s.expect_same(0, i)?;
    }
    s.expect(4, DType::I64)?;
    s.expect_shape(4, &[])?;
    check_hyper(s, 5, 5)?;
    let p = (s.dtype(0), s.shape(0));
    s.results(&[p, p, p])
}
pub(super) fn check_sgd(s: &Signature<'_>) -> Checked {
    s.has_kernel(0, is_float)?;
    s.expect_same(0, 1)?;
    check_hyper(s, 2, 3)?;
    s.results(&[(s.dtype(0), s.shape(0))])
}
pub(super) fn check_sgd_momentum(s: &Signature<'_>) -> Checked {
    s.has_kernel(0, is_float)?;
    s.expect_same(0, 1)?;
    s.expect_same(0, 2)?;
    check_hyper(s, 3, 3)?;
    let p = (s.dtype(0), s.shape(0));
    s.results(&[p, p])
}

// ----------------------------------------------------------------------------------------------------------- kernels

pub(super) fn adamw(call: &Call<'_>) -> Ran {
    wide_float!(call.out_dtype(0), W => adamw_of::<W>(call));
    Ok(())
}
fn adamw_of<R: Real>(call: &Call<'_>) {
    let &[lr, beta1, beta2, eps, decay] = call.input::<f64>(5) else { return };
    let step = call.input::<i64>(4)[0] as f64;
    let step_size = lr / (1.0 - beta1.powf(step));
    let correction2 = (1.0 - beta2.powf(step)).sqrt();
    let [p, g, m, v] = [0, 1, 2, 3].map(|i| source(call, i));
    let [mut new_p, mut new_m, mut new_v] = [0, 1, 2].map(|j| sink(call, j));
    let (keep, weight, step_size) = (R::of_f64(1.0 - lr * decay), R::of_f64(1.0 - beta1), R::of_f64(-step_size));
    let (beta2, rest2, eps, correction2) =
        (R::of_f64(beta2), R::of_f64(1.0 - beta2), R::of_f64(eps), R::of_f64(correction2));
    // PyTorch's lerp counts from the nearer end.
    let near = 1.0 - beta1 < 0.5;
    let rest = R::of_f64(beta1);
    let [mut ps, mut gs, mut ms, mut vs] = [[R::ZERO; BLOCK]; 4];
    for (at, len) in blocks(count(call.out_shape(0))) {
        p.load(&new_p, at, &mut ps[..len]);
        g.load(&new_p, at, &mut gs[..len]);
        m.load(&new_m, at, &mut ms[..len]);
        v.load(&new_v, at, &mut vs[..len]);
        for j in 0..len {
            let (g, m) = (gs[j], ms[j]);
            ms[j] = if near { m + weight * (g - m) } else { g - (g - m) * rest };
            vs[j] = vs[j] * beta2 + rest2 * g * g;
            let denominator = sqrt(vs[j]) / correction2 + eps;
            ps[j] = ps[j] * keep + step_size * ms[j] / denominator;
        }
        new_p.store(at, &ps[..len]);
        new_m.store(at, &ms[..len]);
        new_v.store(at, &vs[..len]);
    }
}

pub(super) fn sgd(call: &Call<'_>) -> Ran {
    wide_float!(call.out_dtype(0), W => sgd_of::<W>(call));
    Ok(())
}
fn sgd_of<R: Real>(call: &Call<'_>) {
    let &[lr, _, decay] = call.input::<f64>(2) else { return };
    let (lr, decay) = (R::of_f64(lr), R::of_f64(decay));
    let ([p, g], mut new_p) = ([0, 1].map(|i| source(call, i)), sink(call, 0));
    let [mut ps, mut gs] = [[R::ZERO; BLOCK]; 2];
    for (at, len) in blocks(count(call.out_shape(0))) {
        p.load(&new_p, at, &mut ps[..len]);
        g.load(&new_p, at, &mut gs[..len]);
        (0..len).for_each(|j| ps[j] = ps[j] - lr * (gs[j] + decay * ps[j]));
        new_p.store(at, &ps[..len]);
    }
}

/// With a buffer that starts at zero this is PyTorch's momentum with dampening 0.
pub(super) fn sgd_momentum(call: &Call<'_>) -> Ran {
    wide_float!(call.out_dtype(0), W => sgd_momentum_of::<W>(call));
    Ok(())
}
fn sgd_momentum_of<R: Real>(call: &Call<'_>) {
    let &[lr, momentum, decay] = call.input::<f64>(3) else { return };
    let (lr, momentum, decay) = (R::of_f64(lr), R::of_f64(momentum), R::of_f64(decay));
    let ([p, g, b], [mut new_p, mut new_b]) = ([0, 1, 2].map(|i| source(call, i)), [0, 1].map(|j| sink(call, j)));
    let [mut ps, mut gs, mut bs] = [[R::ZERO; BLOCK]; 3];
    for (at, len) in blocks(count(call.out_shape(0))) {
        p.load(&new_p, at, &mut ps[..len]);
        g.load(&new_p, at, &mut gs[..len]);
        b.load(&new_b, at, &mut bs[..len]);
        for j in 0..len {
            bs[j] = momentum * bs[j] + (gs[j] + decay * ps[j]);
            ps[j] = ps[j] - lr * bs[j];
        }
        new_p.store(at, &ps[..len]);
        new_b.store(at, &bs[..len]);
    }
}
