//! A table of text, for reports: figures of a paper and ours, side by side.

/// Rows of equal length under a head.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Table {
    /// The columns' names.
    pub head: Vec<String>,
    /// The rows.
    pub rows: Vec<Vec<String>>,
}

impl Table {
    /// A table without rows.
    pub fn new<T: Into<String>>(head: impl IntoIterator<Item = T>) -> Table {
        Table {
            head: head.into_iter().map(Into::into).collect(),
            rows: vec![],
        }
    }

    /// Adds a row.
    ///
    /// # Panics
    ///
    /// If it does not have a cell for each column.
    pub fn push(&mut self, row: Vec<String>) {
        assert_eq!(row.len(), self.head.len(), "a row should have every column");
        self.rows.push(row);
    }

    /// The table as Markdown.
    pub fn markdown(&self) -> String {
        let line = |cells: &[String]| format!("| {} |\n", cells.join(" | "));
        let rows: String = self.rows.iter().map(|row| line(row)).collect();
        format!(
            "{}{}|\n{rows}",
            line(&self.head),
            "|---".repeat(self.head.len())
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_is_markdown() {
        let mut table = Table::new(["a", "b"]);
        table.push(vec!["1".into(), "2".into()]);
        assert_eq!(table.markdown(), "| a | b |\n|---|---|\n| 1 | 2 |\n");
    }
}
