//! Largest flow and smallest cut, by Dinic's algorithm with current arcs (Dinic, 1970).

/// A network with integer capacities.
pub(super) struct Network {
    /// The arcs that leave each vertex. Arc `a`'s reverse is `a ^ 1`.
    out: Vec<Vec<u32>>,
    head: Vec<u32>,
    /// The remaining capacity of each arc.
    room: Vec<i64>,
}

/// More than any sum of capacities that a caller uses.
pub(super) const UNLIMITED: i64 = i64::MAX / 4;

impl Network {
    /// Vertices without arcs.
    pub(super) fn new(n_vertices: usize) -> Network {
        Network {
            out: vec![vec![]; n_vertices],
            head: vec![],
            room: vec![],
        }
    }
    /// Another vertex.
    pub(super) fn vertex(&mut self) -> u32 {
        self.out.push(vec![]);
        self.out.len() as u32 - 1
    }
    /// An arc.
    pub(super) fn arc(&mut self, from: u32, to: u32, room: i64) {
        for (tail, head, room) in [(from, to, room), (to, from, 0)] {
            self.out[tail as usize].push(self.head.len() as u32);
            self.head.push(head);
            self.room.push(room);
        }
    }

    /// Sends the largest flow. Returns its size, and whether each vertex is on the source's side of
    /// the minimum cut that is nearest to the source.
    pub(super) fn cut(&mut self, source: u32, sink: u32) -> (i64, Vec<bool>) {
        let mut sent = 0;
        loop {
            let level = self.levels(sink);
            if level[source as usize] == u32::MAX {
                break;
            }
            sent += self.block(source, sink, &level);
        }
        let mut reached = vec![false; self.out.len()];
        reached[source as usize] = true;
        let mut stack = vec![source];
        while let Some(vertex) = stack.pop() {
            for &arc in &self.out[vertex as usize] {
                let head = self.head[arc as usize] as usize;
                if 0 < self.room[arc as usize] && !reached[head] {
                    reached[head] = true;
                    stack.push(head as u32);
                }
            }
        }
        (sent, reached)
    }

    /// The distance from each vertex to the sink, over arcs with room.
    fn levels(&self, sink: u32) -> Vec<u32> {
        let mut level = vec![u32::MAX; self.out.len()];
        level[sink as usize] = 0;
        let mut queue = std::collections::VecDeque::from([sink]);
        while let Some(vertex) = queue.pop_front() {
            for &arc in &self.out[vertex as usize] {
                let tail = self.head[arc as usize] as usize;
                if 0 < self.room[(arc ^ 1) as usize] && level[tail] == u32::MAX {
                    level[tail] = level[vertex as usize] + 1;
                    queue.push_back(tail as u32);
                }
            }
        }
        level
    }

    /// Fills shortest paths until none is left.
    fn block(&mut self, source: u32, sink: u32, level: &[u32]) -> i64 {
        let mut next = vec![0usize; self.out.len()];
        let mut path: Vec<u32> = vec![];
        let mut sent = 0;
        loop {
            let at = path.last().map_or(source, |&arc| self.head[arc as usize]) as usize;
            if at == sink as usize {
                let least = path
                    .iter()
                    .map(|&arc| self.room[arc as usize])
                    .min()
                    .expect("a path should have arcs");
                for &arc in &path {
                    self.room[arc as usize] -= least;
                    self.room[(arc ^ 1) as usize] += least;
                }
                sent += least;
                let full = path
                    .iter()
                    .position(|&arc| self.room[arc as usize] == 0)
                    .unwrap_or(0);
                path.truncate(full);
                continue;
            }
            let fits = |&arc: &u32| {
                0 < self.room[arc as usize]
                    && level[self.head[arc as usize] as usize] + 1 == level[at]
            };
            match self.out[at].get(next[at]) {
                Some(arc) if level[self.head[*arc as usize] as usize] != u32::MAX && fits(arc) => {
                    path.push(*arc)
                }
                Some(_) => next[at] += 1,
                None => {
                    let Some(arc) = path.pop() else { return sent };
                    next[self.head[(arc ^ 1) as usize] as usize] += 1;
                }
            }
        }
    }
}
