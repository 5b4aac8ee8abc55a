//! Page tables as operations take them.

use crate::error::{Error, Result};

/// Which pages of a pool hold the tokens of each sequence: token `j` of sequence `b` lies in slot `j % page_len` of page
/// `pages[offsets[b] + j / page_len]`. Sequences may share pages, and have more pages than their tokens need.
///
/// ```
/// use wgpu_attention::PageTable;
/// // Two sequences of up to 32 tokens share their first page.
/// let table = PageTable { page_len: 16, offsets: &[0, 2, 4], pages: &[7, 0, 7, 3] };
/// assert_eq!(table.of(1), [7, 3]);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageTable<'a> {
    /// Tokens of a page, at least 1.
    pub page_len: u32,
    /// Where each sequence's pages begin in `pages`: from 0, ascending, one more than there are sequences.
    pub offsets: &'a [u32],
    /// Pages of all sequences, one sequence after the other.
    pub pages: &'a [u32],
}

impl<'a> PageTable<'a> {
    /// Sequences.
    pub fn batch(&self) -> usize {
        self.offsets.len().saturating_sub(1)
    }

    /// The pages of sequence `b`.
    pub fn of(&self, b: usize) -> &'a [u32] {
        &self.pages[self.offsets[b] as usize..self.offsets[b + 1] as usize]
    }

    /// Whether the numbers make sense together, for sequences of `lens` tokens.
    pub fn validate(&self, lens: impl ExactSizeIterator<Item = u32>) -> Result<()> {
        if self.page_len == 0 {
            return Err(Error::shape("page_len", "at least 1", 0));
        }
        if self.offsets.first() != Some(&0) {
            let given = self.offsets.first().map_or("none".into(), u32::to_string);
            return Err(Error::shape("page table offsets", "a first offset of 0", given));
        }
        if let Some(at) = self.offsets.windows(2).position(|pair| pair[0] > pair[1]) {
            let given = format!("{} after {}", self.offsets[at + 1], self.offsets[at]);
            return Err(Error::shape("page table offsets", "ascending offsets", given));
        }
        let last = self.offsets[self.batch()];
        if last as usize > self.pages.len() {
            return Err(Error::shape("page table", format!("{last} pages, as its offsets say"), self.pages.len()));
        }
        if lens.len() != self.batch() {
            return Err(Error::shape("page table", format!("{} sequences", lens.len()), self.batch()));
        }
        for (b, len) in lens.enumerate() {
            let (need, given) = (len.div_ceil(self.page_len), self.offsets[b + 1] - self.offsets[b]);
            if given < need {
                let expected = format!("{need} pages for {len} tokens of sequence {b}");
                return Err(Error::shape("page table", expected, given));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bad_tables_are_refused() {
        let good = PageTable { page_len: 4, offsets: &[0, 2, 2], pages: &[5, 1] };
        let check = |table: PageTable, lens: &[u32]| table.validate(lens.iter().copied()).map_err(|e| e.to_string());
        assert_eq!(check(good, &[8, 0]), Ok(()));
        let bad: &[(PageTable, &[u32], &str)] = &[
            (good, &[9, 0], "page table: expected 3 pages for 9 tokens of sequence 0, got 2"),
            (good, &[8, 1], "page table: expected 1 pages for 1 tokens of sequence 1, got 0"),
            (good, &[8], "page table: expected 1 sequences, got 2"),
            (PageTable { page_len: 0, ..good }, &[8, 0], "page_len: expected at least 1, got 0"),
            (
                PageTable { offsets: &[0, 3, 2], ..good },
                &[8, 0],
                "page table offsets: expected ascending offsets, got 2 after 3",
            ),
            (
                PageTable { offsets: &[1, 2, 2], ..good },
                &[8, 0],
                "page table offsets: expected a first offset of 0, got 1",
            ),
            (PageTable { offsets: &[], ..good }, &[], "page table offsets: expected a first offset of 0, got none"),
            (
                PageTable { offsets: &[0, 2, 3], ..good },
                &[8, 0],
                "page table: expected 3 pages, as its offsets say, got 2",
            ),
        ];
        for (table, lens, message) in bad {
            assert_eq!(check(*table, lens), Err(message.to_string()));
        }
    }
}
