//! Batch norm of many elements, whose sums are made in several steps, and of numbers far from zero.

use artifact::{Attr, DType};
use lighterage_runtime::Team;
use lighterage_runtime::kernels::owned::{OwnedTensor, Run};

/// Numbers around 100, with a deviation of about 0.6.
fn numbers(shape: &[usize], seed: usize) -> Vec<f64> {
    let number = |i: usize| {
        let hash = i.wrapping_mul(2_654_435_761).wrapping_add(seed * 97) >> 7;
        f64::from((100.0 + (hash % 2048) as f64 / 1024.0 - 1.0) as f32)
    };
    (0..shape.iter().product()).map(number).collect()
}

/// The channel of each element.
fn channels(shape: &[usize]) -> Vec<usize> {
    let inner: usize = shape[2..].iter().product();
    (0..shape.iter().product())
        .map(|i| i / inner % shape[1])
        .collect()
}

fn near(is: &[f64], should: &[f64], within: f64) {
    for (i, (is, should)) in is.iter().zip(should).enumerate() {
        assert!((is - should).abs() <= within, "{i}: {is}, not {should}");
    }
}

/// Runs whole, on threads and in parts: the bits are the same.
fn results(
    op: &str,
    attrs: &[(String, Attr)],
    ins: &[&OwnedTensor],
    shapes: &[&[usize]],
) -> Vec<Vec<f64>> {
    let outs: Vec<_> = shapes
        .iter()
        .map(|shape| (DType::F32, shape.to_vec()))
        .collect();
    let run = || Run::new(op, attrs, ins, &outs, 0, &[]).unwrap();
    let of = |run: Run<'_>| {
        run.results
            .iter()
            .map(OwnedTensor::to_f64s)
            .collect::<Vec<_>>()
    };
    let mut whole = run();
    whole.run().unwrap();
    let whole = of(whole);
    let mut shared = run();
    shared.run_on(Some(&Team::new(3).unwrap()), || {}).unwrap();
    assert_eq!(of(shared), whole);
    let mut parts = run();
    parts.run_in_parts(&[1, 2, 5]).unwrap();
    assert_eq!(of(parts), whole);
    whole
}

#[test]
fn statistics_of_many_numbers_are_exact() {
    for shape in [
        &[400, 300][..],
        &[37, 5, 7],
        &[3, 2, 5000],
        &[40, 3, 17, 20],
        &[20, 257],
    ] {
        let c = [shape[1]];
        let (x, dy) = (numbers(shape, 1), numbers(shape, 2));
        let (w, b) = (numbers(&c, 3), numbers(&c, 4));
        let of = channels(shape);
        let n = (x.len() / c[0]) as f64;
        let sums = |term: &dyn Fn(usize) -> f64| {
            let mut sums = vec![0.0; c[0]];
            of.iter().enumerate().for_each(|(i, &c)| sums[c] += term(i));
            sums
        };
        let means: Vec<f64> = sums(&|i| x[i]).iter().map(|sum| sum / n).collect();
        let squares = sums(&|i| (x[i] - means[of[i]]).powi(2));
        let rstds: Vec<f64> = squares
            .iter()
            .map(|s| 1.0 / (s / n + 1e-5).sqrt())
            .collect();
        let normal = |i: usize| (x[i] - means[of[i]]) * rstds[of[i]];
        let tensor =
            |shape: &[usize], numbers: &[f64]| OwnedTensor::from_f64s(DType::F32, shape, numbers);
        let [xt, wt, bt, dyt] =
            [(shape, &x), (&c, &w), (&c, &b), (shape, &dy)].map(|(s, x)| tensor(s, x));

        let eps = [("eps".to_string(), Attr::Float(1e-5))];
        let [y, mean, rstd, variance] =
            results("batch_norm", &eps, &[&xt, &wt, &bt], &[shape, &c, &c, &c])
                .try_into()
                .unwrap();
        near(&mean, &means, 1e-5);
        near(&rstd, &rstds, 1e-5);
        let variances: Vec<f64> = squares.iter().map(|s| s / (n - 1.0)).collect();
        near(&variance, &variances, 1e-6);
        let wanted: Vec<f64> = (0..x.len())
            .map(|i| normal(i) * w[of[i]] + b[of[i]])
            .collect();
        near(&y, &wanted, 1e-3);

        // The backward gets statistics in f32.
        let [means, rstds] = [means, rstds].map(|numbers| {
            let rounded = numbers.into_iter().map(|number| f64::from(number as f32));
            rounded.collect::<Vec<_>>()
        });
        let normal = |i: usize| (x[i] - means[of[i]]) * rstds[of[i]];
        let mask = [("mask".to_string(), Attr::Ints(vec![1; 3]))];
        let (meant, rstdt) = (tensor(&c, &means), tensor(&c, &rstds));
        let ins = [&dyt, &xt, &wt, &meant, &rstdt];
        let [dx, dw, db] = results("batch_norm_bwd", &mask, &ins, &[shape, &c, &c])
            .try_into()
            .unwrap();
        let (dws, dbs) = (sums(&|i| dy[i] * normal(i)), sums(&|i| dy[i]));
        near(&db, &dbs, 1e-6 * 100.0 * n);
        near(&dw, &dws, 1e-5 * 100.0 * n);
        let wanted: Vec<f64> = (0..x.len())
            .map(|i| {
                let c = of[i];
                w[c] * rstds[c] * (dy[i] - dbs[c] / n - normal(i) * dws[c] / n)
            })
            .collect();
        near(&dx, &wanted, 5e-3);
    }
}
