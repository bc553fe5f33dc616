fn main() {
    for path in std::env::args().skip(1) {
        let text = std::fs::read_to_string(&path).unwrap();
        let ir::text::File::Graph(mut graph) = ir::text::parse_file(&text).unwrap() else { panic!() };
        let count = |g: &ir::Graph| {
            let mut c = std::collections::BTreeMap::new();
            for &n in &g.order {
                *c.entry(g.nodes[n].op.name()).or_insert(0) += 1;
            }
            c
        };
        let before = count(&graph);
        let t = std::time::Instant::now();
        passes::graph::simplify::run(&mut graph);
        let dt = t.elapsed();
        let findings = ir::verify::graph(&graph);
        let after = count(&graph);
        let sum = |c: &std::collections::BTreeMap<&str, i32>| {
            c.iter().filter(|(k, _)| **k != "reshape").map(|(_, v)| v).sum::<i32>()
        };
        eprintln!(
            "{path}: {} -> {} lines, {dt:?}, {} findings {:?}",
            sum(&before),
            sum(&after),
            findings.len(),
            findings.first()
        );
        std::fs::write(format!("{path}.simp"), ir::text::print_graph(&graph)).unwrap();
        for k in before.keys().chain(after.keys()).collect::<std::collections::BTreeSet<_>>() {
            let (b, a) = (before.get(*k).unwrap_or(&0), after.get(*k).unwrap_or(&0));
            if a != b {
                println!("   {k} {b} -> {a}");
            }
        }
    }
}
