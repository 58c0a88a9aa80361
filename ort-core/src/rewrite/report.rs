//! What the optimizer changed: rules by name, and nodes by pass.

/// What the optimizer changed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    hits: Vec<(&'static str, usize)>,
    /// Nodes folded into constants.
    pub folded: usize,
    /// Nodes merged by common-subexpression elimination.
    pub common: usize,
    /// Nodes removed by dead-code elimination.
    pub unread: usize,
}

impl Report {
    /// Returns how often each rule applied, sorted by name. Rules that never applied are absent.
    pub fn hits(&self) -> &[(&'static str, usize)] {
        &self.hits
    }

    /// Returns the total number of rule applications.
    pub fn total(&self) -> usize {
        self.hits.iter().map(|(_, count)| count).sum()
    }

    /// Returns how many nodes were folded, merged or removed, without those that rules replaced.
    pub(super) fn without_rules(&self) -> usize {
        self.folded + self.common + self.unread
    }

    pub(super) fn count(&mut self, rule: &'static str) {
        match self.hits.binary_search_by_key(&rule, |(name, _)| *name) {
            Ok(index) => self.hits.iter_mut().skip(index).take(1).for_each(|(_, count)| *count += 1),
            Err(index) => self.hits.insert(index, (rule, 1)),
        }
    }
}
