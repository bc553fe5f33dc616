//! Attention by numbers of documents has the bits of attention with the mask of the same documents,
//! over several tiles of keys, of which some are of other documents than a block's queries.

use super::generate::Rng;
use artifact::{Attr, DType};
use lighterage_runtime::kernels::owned::{OwnedTensor, run_op};

/// More than two tiles of keys.
const LENGTH: usize = 1100;

#[test]
fn documents_have_the_bits_of_their_mask() {
    let mut rng = Rng(5);
    let lengths = [3, 600, 1, 130, 366];
    let documents = (0..)
        .zip(lengths)
        .flat_map(|(k, n)| std::iter::repeat_n(k, n));
    let documents: Vec<i64> = documents.collect();
    let of_one = |own: &i64| {
        documents
            .iter()
            .map(|other| i64::from(own == other))
            .collect()
    };
    let pairs = documents.iter().map(of_one).collect::<Vec<Vec<i64>>>();
    let pairs = pairs.concat();
    let by_number = OwnedTensor::from_i64s(DType::I64, &[1, LENGTH], &documents);
    let by_pair = OwnedTensor::from_i64s(DType::Bool, &[1, 1, LENGTH, LENGTH], &pairs);

    let (heads, shared) = ([2, 2, LENGTH, 8], [2, 1, LENGTH, 8]);
    let [q, dout] = [0, 1].map(|_| rng.tensor(DType::F32, &heads));
    let [k, v] = [0, 1].map(|_| rng.tensor(DType::F32, &shared));
    for causal in [true, false] {
        let attrs = [
            ("causal".to_string(), Attr::Bool(causal)),
            ("scale".to_string(), Attr::Float(0.3)),
        ];
        let run = |mask: &OwnedTensor| {
            let results = [
                (DType::F32, heads.to_vec()),
                (DType::F32, heads[..3].to_vec()),
            ];
            let forward = run_op("sdpa", &attrs, &[&q, &k, &v, mask], &results, 1 << 20).unwrap();
            let operands = [&dout, &q, &k, &v, &forward[0], &forward[1], mask];
            let results = [&heads, &shared, &shared].map(|s| (DType::F32, s.to_vec()));
            let backward = run_op("sdpa_bwd", &attrs, &operands, &results, 1 << 20).unwrap();
            let all = forward.iter().chain(&backward);
            all.map(|x| x.bytes().to_vec()).collect::<Vec<_>>()
        };
        assert!(run(&by_number) == run(&by_pair), "causal {causal}");
    }
}
