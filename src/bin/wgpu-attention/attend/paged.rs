//! The same problem with K and V in pages at random places of a pool, to prove that this changes nothing.

use anyhow::{Context, Result};
use wgpu_attention::{AttentionDesc, Batch, HostInput, Layout, Lengths, PageTable, cases};

/// K and V of a batch in pages `[page, kv_head, slot, dim]`, one page more than needed; what holds no key is NaN.
pub struct Paged {
    k: Vec<f32>,
    v: Vec<f32>,
    lens: Vec<u32>,
    page_len: u32,
    offsets: Vec<u32>,
    pages: Vec<u32>,
}

impl Paged {
    pub fn new(desc: &AttentionDesc, batch: &Batch, input: &HostInput, page_len: u32) -> Result<Paged> {
        let lens: Vec<u32> = (0..batch.kv.batch()).map(|b| batch.kv.len(b)).collect();
        let mut offsets = vec![0u32];
        for (len, last) in lens.iter().zip(0..) {
            let end = offsets[last].checked_add(len.div_ceil(page_len));
            offsets.push(end.context("there are too many pages; choose a larger --page-len")?);
        }
        let used = offsets[lens.len()];
        let count = used.checked_add(1).context("there are too many pages; choose a larger --page-len")?;
        let mut pages = cases::shuffled(count);
        pages.truncate(used as usize);
        let mut paged = Paged { k: Vec::new(), v: Vec::new(), lens, page_len, offsets, pages };
        paged.k = paged.pool(batch, &batch.k_layout, input.k, desc.kv_heads, desc.head_dim)?;
        paged.v = paged.pool(batch, &batch.v_layout, input.v, desc.kv_heads, desc.v_dim())?;
        Ok(paged)
    }

    fn table(&self) -> PageTable<'_> {
        PageTable { page_len: self.page_len, offsets: &self.offsets, pages: &self.pages }
    }

    pub fn page_count(&self) -> usize {
        self.pages.len()
    }

    fn pool(&self, batch: &Batch, from: &Layout, values: &[f32], heads: u32, dim: u32) -> Result<Vec<f32>> {
        let to = Layout::bhsd(self.page_len, heads, dim);
        let elements = to.batch.checked_mul(self.pages.len() as u64 + 1).and_then(|n| usize::try_from(n).ok());
        let elements = elements.filter(|n| *n <= isize::MAX as usize / 4);
        let elements = elements.context("pages of this length do not fit in memory; choose a smaller --page-len")?;
        let mut pool = Vec::new();
        pool.try_reserve_exact(elements)
            .context("pages of this length do not fit in memory; choose a smaller --page-len")?;
        pool.resize(elements, f32::NAN);
        let table = self.table();
        for (b, len) in self.lens.iter().enumerate() {
            for (key, head) in (0..*len).flat_map(|key| (0..heads).map(move |head| (key, head))) {
                let read = batch.kv.start(b, from) + u64::from(key) * from.seq + u64::from(head) * from.head;
                let page = u64::from(table.of(b)[(key / self.page_len) as usize]);
                let slot = u64::from(key % self.page_len);
                let written = page * to.batch + slot * to.seq + u64::from(head) * to.head;
                pool[written as usize..][..dim as usize].copy_from_slice(&values[read as usize..][..dim as usize]);
            }
        }
        Ok(pool)
    }

    /// `dense` with its keys in these pages.
    pub fn batch<'a>(&'a self, desc: &AttentionDesc, dense: &Batch<'a>) -> Batch<'a> {
        let max_len = self.lens.iter().copied().max().unwrap_or(0);
        Batch {
            kv: Lengths::Padded { max_len, lens: &self.lens },
            pages: Some(self.table()),
            k_layout: Layout::bhsd(self.page_len, desc.kv_heads, desc.head_dim),
            v_layout: Layout::bhsd(self.page_len, desc.kv_heads, desc.v_dim()),
            ..*dense
        }
    }

    pub fn input<'a>(&'a self, dense: &HostInput<'a>) -> HostInput<'a> {
        HostInput { k: &self.k, v: &self.v, ..*dense }
    }
}
