//! Kernels whose rows threads share: the same bits on any number of them.

use crate::generate::Rng;
use artifact::{Attr, DType};
use runtime::Team;
use runtime::kernels::Split;
use runtime::kernels::owned::{OwnedTensor, Run};

/// Batch, rows, inner and columns: parts end within a matrix and span several, and the last is short.
const PRODUCTS: [[usize; 4]; 4] = [[1, 700, 65, 513], [5, 300, 17, 601], [40, 10, 3, 4097], [3, 257, 0, 300]];

fn numbers(dtype: DType, shape: &[usize], seed: u64) -> OwnedTensor {
    let mut rng = Rng(seed);
    let n = shape.iter().product();
    OwnedTensor::from_f64s(dtype, shape, &(0..n).map(|_| rng.below(2001) as f64 / 64.0 - 15.0).collect::<Vec<_>>())
}

#[test]
fn threads_change_no_bit_of_rows() {
    let teams = [2, 3, 7].map(|threads| Team::new(threads).unwrap());
    for kernel in runtime::kernels::KERNELS.iter().filter(|kernel| kernel.split == Split::Rows) {
        for (case, [batch, m, k, n]) in PRODUCTS.into_iter().enumerate() {
            // Halves want scratch, and so are not shared.
            let dtype = [DType::F32, DType::F64, DType::I32, DType::F32][case];
            for (ta, tb) in [(false, false), (true, false), (false, true)] {
                let shape = |rows, columns, t| if t { vec![batch, columns, rows] } else { vec![batch, rows, columns] };
                let mut ins = vec![numbers(dtype, &shape(m, k, ta), 1), numbers(dtype, &shape(k, n, tb), 2)];
                match kernel.name {
                    "matmul" => {}
                    "addmm" => ins.insert(0, numbers(dtype, [&[n][..], &[m, 1], &[batch, m, n], &[]][case], 3)),
                    other => panic!("{other} needs operands here"),
                }
                let attrs = [("ta".into(), Attr::Bool(ta)), ("tb".into(), Attr::Bool(tb))];
                let run = |team| {
                    let outs = [(dtype, vec![batch, m, n])];
                    let ins: Vec<&OwnedTensor> = ins.iter().collect();
                    let mut run = Run::new(kernel.name, &attrs, &ins, &outs, 0, &[]).unwrap();
                    run.run_on(team, || {}).unwrap();
                    run.results[0].bytes()
                };
                let alone = run(None);
                for team in &teams {
                    assert!(run(Some(team)) == alone, "{} {case}, {ta} {tb}, {} threads", kernel.name, team.threads());
                }
            }
        }
    }
}
