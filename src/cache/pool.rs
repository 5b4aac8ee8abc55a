//! The pages themselves: K and V of all sequences in two buffers on the device.

use std::collections::HashSet;
use std::sync::Arc;

use crate::cache::{PageCopy, PageTable};
use crate::error::{Error, Result};
use crate::kernel::Pipeline;
use crate::ops::attention::{AttentionDesc, Batch, Lengths, MAX_HEAD_DIM, MAX_HEADS, MAX_LEN, MAX_V_HEAD_DIM};
use crate::runtime::Runtime;
use crate::shader::{Link, shader_struct};
use crate::view::{DType, Layout, View};

/// Order of the elements of a page.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum PageOrder {
    /// `[kv_head, slot, dim]`: the keys of a head lie together, which attention reads best.
    #[default]
    Hnd,
    /// `[slot, kv_head, dim]`: a token lies together, and tokens lie as they are computed.
    Nhd,
}

/// What a [`PagedCache`] is made for. K and V have one pool each, `[page, kv_head, slot, dim]` or `[page, slot, kv_head, dim]`;
/// pages begin at whole 32-bit words.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PagedCacheDesc {
    /// Pages, at least 1; [`PagedCacheDesc::max_pages`] is how many there can be.
    pub page_count: u32,
    /// Tokens of a page, at least 1.
    pub page_len: u32,
    /// Key/value heads, 1 to 2048.
    pub kv_heads: u32,
    /// Dim of K heads, 1 to 576.
    pub head_dim: u32,
    /// Dim of V heads, 1 to 512; that of K if `None`.
    pub v_head_dim: Option<u32>,
    /// Type of K and V.
    pub dtype: DType,
    /// Order of the elements of a page.
    pub order: PageOrder,
}

impl PagedCacheDesc {
    /// Dim of V heads.
    pub fn v_dim(&self) -> u32 {
        self.v_head_dim.unwrap_or(self.head_dim)
    }

    /// Where K lies: [`Layout::batch`] is the distance between pages, [`Layout::seq`] that between slots.
    pub fn k_layout(&self) -> Layout {
        self.layout(self.head_dim)
    }

    /// Where V lies.
    pub fn v_layout(&self) -> Layout {
        self.layout(self.v_dim())
    }

    /// Whether a caller's heads, dims, type and pages are those of the cache.
    pub(crate) fn check(
        &self,
        kv_heads: u32,
        head_dim: u32,
        v_dim: u32,
        dtype: DType,
        table: &PageTable,
    ) -> Result<()> {
        for (what, here, there) in [
            ("kv_heads", self.kv_heads, kv_heads),
            ("head_dim", self.head_dim, head_dim),
            ("v_head_dim", self.v_dim(), v_dim),
            ("page_len of the table", self.page_len, table.page_len),
        ] {
            if here != there {
                return Err(Error::shape(what, format!("{here}, as the cache has"), there));
            }
        }
        if self.dtype != dtype {
            return Err(Error::shape("kv_dtype", format!("{}, as the cache has", self.dtype), dtype));
        }
        self.check_pages(table.pages)
    }

    fn check_pages(&self, pages: &[u32]) -> Result<()> {
        match pages.iter().find(|page| **page >= self.page_count) {
            Some(page) => Err(Error::shape("page", format!("less than the cache's {}", self.page_count), page)),
            None => Ok(()),
        }
    }

    fn layout(&self, dim: u32) -> Layout {
        let layout = match self.order {
            PageOrder::Hnd => Layout::bhsd(self.page_len, self.kv_heads, dim),
            PageOrder::Nhd => Layout::bshd(self.page_len, self.kv_heads, dim),
        };
        let whole = 4 / self.dtype.size();
        Layout { batch: layout.batch.checked_next_multiple_of(whole).unwrap_or(u64::MAX), ..layout }
    }

    /// Bytes of one page, of K and of V together.
    pub fn page_bytes(&self) -> u64 {
        let [k, v] = self.bytes();
        k.saturating_add(v)
    }

    /// Bytes of one page of K and of V.
    fn bytes(&self) -> [u64; 2] {
        [self.k_layout(), self.v_layout()].map(|layout| layout.batch.saturating_mul(self.dtype.size()))
    }

    /// How many pages of this kind a pool on this device can have, whatever `page_count` says: each of K and V must be one
    /// binding, one buffer, and at most 2³² elements. Whether so much memory is left is another question.
    ///
    /// ```no_run
    /// # fn f(runtime: &wgpu_attention::Runtime) -> wgpu_attention::Result<()> {
    /// use wgpu_attention::{DType, PageOrder, PagedCache, PagedCacheDesc, Pages};
    /// let desc = PagedCacheDesc {
    ///     page_count: 1,
    ///     page_len: 16,
    ///     kv_heads: 8,
    ///     head_dim: 128,
    ///     v_head_dim: None,
    ///     dtype: DType::F16,
    ///     order: PageOrder::Hnd,
    /// };
    /// let page_count = desc.max_pages(runtime)?.min(10_000);
    /// let cache = PagedCache::new(runtime, &PagedCacheDesc { page_count, ..desc })?;
    /// let pages = Pages::new(page_count, desc.page_len)?;
    /// # Ok(()) }
    /// ```
    pub fn max_pages(&self, runtime: &Runtime) -> Result<u32> {
        Error::unless_in("page_len", self.page_len, MAX_LEN)?;
        Error::unless_in("kv_heads", self.kv_heads, MAX_HEADS)?;
        Error::unless_in("head_dim", self.head_dim, MAX_HEAD_DIM)?;
        Error::unless_in("v_head_dim", self.v_dim(), MAX_V_HEAD_DIM)?;
        let [k, v] = self.bytes();
        let (_, most) = self.largest(runtime);
        Ok(u32::try_from(most / k.max(v)).unwrap_or(u32::MAX))
    }

    /// The limit that a pool meets first, and its bytes.
    fn largest(&self, runtime: &Runtime) -> (&'static str, u64) {
        let limits = &runtime.caps().limits;
        let limits = [
            ("max_storage_buffer_binding_size", limits.max_storage_buffer_binding_size),
            ("max_buffer_size", limits.max_buffer_size / 16 * 16), // buffers are whole vec4s
            ("offsets of 32 bits", u64::from(u32::MAX - MOST_LANES) * self.dtype.size()),
        ];
        limits.into_iter().min_by_key(|(_, bytes)| *bytes).unwrap_or_default()
    }
}

shader_struct! {
    /// In 32-bit words.
    struct Range {
        start: u32,
        to: u32,
        words: u32,
    }
}

#[doc(hidden)]
pub const STRUCTS: &[(&str, &str, &[&str])] = &[("page_copy", "Range", Range::FIELDS)];

/// Every module of the cache, for the tests that compile them for other platforms.
#[doc(hidden)]
pub fn links() -> Vec<(String, crate::Needs, Link)> {
    vec![("page_copy".into(), crate::Needs::NONE, copy_link())]
}

/// Lanes that share one copy; a lane's offset goes past the end by so much at most.
const MOST_LANES: u32 = 256 * 65_535;

fn copy_link() -> Link {
    Link { file: "page_copy", ..Link::default() }
}

/// A pool of pages for K and one for V, on the device. Which sequence has which page is for [`Pages`](crate::Pages) to say.
///
/// ```
/// use wgpu_attention::*;
///
/// # fn main() -> Result<()> { pollster::block_on(async {
/// # let Some(adapter) = adapters().await.into_iter().next() else { return Ok(()) };
/// # let options = RuntimeOptions { self_test: SelfTest::Skip, ..RuntimeOptions::default() };
/// # let runtime = Runtime::open(&adapter, options).await?;
/// // 8 pages of 2 tokens, one head of 2.
/// let desc = PagedCacheDesc {
///     page_count: 8,
///     page_len: 2,
///     kv_heads: 1,
///     head_dim: 2,
///     v_head_dim: None,
///     dtype: DType::F32,
///     order: PageOrder::Hnd,
/// };
/// let cache = PagedCache::new(&runtime, &desc)?;
/// let mut pages = Pages::new(desc.page_count, desc.page_len)?;
/// let mut encoder = runtime.device().create_command_encoder(&Default::default());
///
/// // Room for 3 tokens, then what must be copied before they are written (nothing, in a sequence that shares no page).
/// let sequence = pages.create();
/// let mut copies = Vec::new();
/// pages.append(&[(sequence, 3)], &mut copies)?;
/// cache.record_copies(&mut encoder, &copies)?;
///
/// // Token 2 lies in slot 0 of the second page; all K are 0, so that the output is the mean of V.
/// let (page, slot) = pages.slot(sequence, 2)?;
/// let layout = desc.v_layout();
/// let at = (u64::from(page) * layout.batch + u64::from(slot) * layout.seq) * desc.dtype.size();
/// runtime.queue().write_buffer(cache.v().buffer, at, &desc.dtype.encode(&[3.0, 6.0]));
///
/// let attention = Attention::new(&runtime, &AttentionDesc { head_dim: 2, ..AttentionDesc::default() })?;
/// let mut buffer = TableBuffer::default(); // kept from step to step
/// let (table, lens) = pages.table(&[sequence], &mut buffer)?;
/// let rows = Lengths::Uniform { batch: 1, len: 1 };
/// let schedule = attention.schedule(&cache.batch(attention.desc(), rows, lens, table)?)?;
/// let usage = wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_SRC;
/// let (q, out) = (runtime.buffer("q", 8, usage)?, runtime.buffer("out", 8, usage)?);
/// let io =
///     AttentionIo { q: (&q).into(), k: cache.k(), v: cache.v(), out: (&out).into(), lse: None, bias: None, mask: None };
/// attention.record(&mut encoder, &schedule, &io)?;
/// runtime.queue().submit([encoder.finish()]);
/// assert_eq!(DType::F32.decode(&runtime.read(&out, 8).await?, 2), [1.0, 2.0]);
/// # Ok(()) }) }
/// ```
#[derive(Debug)]
pub struct PagedCache {
    runtime: Runtime,
    desc: PagedCacheDesc,
    /// K, V.
    pools: [wgpu::Buffer; 2],
    copy: Arc<Pipeline>,
}

impl PagedCache {
    /// Two buffers of zeros with usages `STORAGE`, `COPY_SRC` and `COPY_DST`. More pages than the device can hold in one
    /// binding are [`Error::Limit`], whose `limit` is the pages that would do.
    pub fn new(runtime: &Runtime, desc: &PagedCacheDesc) -> Result<Self> {
        let max_pages = desc.max_pages(runtime)?;
        let (limit, bytes) = desc.largest(runtime);
        if desc.page_count == 0 {
            return Err(Error::shape("page_count", "at least 1", 0));
        }
        if desc.page_count > max_pages {
            let [k, v] = desc.bytes();
            let hint = format!(
                "a pool is at most {bytes} bytes ({limit}) and a page takes {}; make fewer pages, or request the device \
                 with the adapter's limits",
                k.max(v)
            );
            return Err(Error::limit("page_count", max_pages.into(), desc.page_count.into(), hint));
        }
        let usage = wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_SRC | wgpu::BufferUsages::COPY_DST;
        let [k, v] = desc.bytes().map(|bytes| u64::from(desc.page_count) * bytes);
        Ok(PagedCache {
            pools: [runtime.buffer("k pool", k, usage)?, runtime.buffer("v pool", v, usage)?],
            copy: runtime.pipeline("page_copy", &copy_link())?,
            runtime: runtime.clone(),
            desc: *desc,
        })
    }

    /// What it was made of.
    pub fn desc(&self) -> &PagedCacheDesc {
        &self.desc
    }

    /// The pool of K, for [`AttentionIo::k`](crate::AttentionIo::k).
    pub fn k(&self) -> View<'_> {
        (&self.pools[0]).into()
    }

    /// The pool of V.
    pub fn v(&self) -> View<'_> {
        (&self.pools[1]).into()
    }

    /// Rows `q` against the keys that this cache holds: [`Batch::paged`] with the layouts of its pools, after a check that
    /// the attention is one of these heads, dims and type and that the table is one of these pages.
    pub fn batch<'a>(
        &self,
        attention: &AttentionDesc,
        q: Lengths<'a>,
        kv_lens: &'a [u32],
        table: PageTable<'a>,
    ) -> Result<Batch<'a>> {
        let desc = &self.desc;
        desc.check(attention.kv_heads, attention.head_dim, attention.v_dim(), attention.kv_dtype, &table)?;
        let (k_layout, v_layout) = (desc.k_layout(), desc.v_layout());
        Ok(Batch { k_layout, v_layout, ..Batch::paged(attention, q, kv_lens, table) })
    }

    /// Appends copies to `encoder`, in their order: a later one may read what an earlier one wrote. Record them before the
    /// writes for which [`Pages::append`](crate::Pages::append) asked for them. Nothing is submitted; errors leave the
    /// encoder as it was.
    pub fn record_copies(&self, encoder: &mut wgpu::CommandEncoder, copies: &[PageCopy]) -> Result<()> {
        self.runtime.check_lost()?;
        for PageCopy { from, to, slots } in copies {
            self.desc.check_pages(&[*from, *to])?;
            if *slots > self.desc.page_len {
                return Err(Error::shape("slots of a copy", format!("at most {}", self.desc.page_len), slots));
            }
        }
        let limits = &self.runtime.caps().limits;
        let alignment = u64::from(limits.min_storage_buffer_offset_alignment);
        let most = limits.max_storage_buffer_binding_size / size_of::<Range>() as u64;
        let most = most.min(limits.max_compute_workgroups_per_dimension.into()) as usize;
        let mut lists = Vec::new(); // of all dispatches
        let mut dispatches = Vec::new(); // pool, bytes in the lists, workgroups of the longest range
        for wave in waves(copies) {
            for chunk in wave.chunks(most) {
                for pool in 0..2 {
                    lists.resize(lists.len().next_multiple_of(alignment as usize), 0u8);
                    let start = lists.len() as u64;
                    let ranges: Vec<Range> = chunk.iter().map(|copy| self.range(pool, copy)).collect();
                    lists.extend_from_slice(bytemuck::cast_slice(&ranges));
                    let longest = ranges.iter().map(|range| range.words).max().unwrap_or(0);
                    dispatches.push((pool, start..lists.len() as u64, longest.div_ceil(1024).min(65_535)));
                }
            }
        }
        if dispatches.is_empty() {
            return Ok(());
        }
        let lists = self.runtime.upload("page copies", &lists, wgpu::BufferUsages::STORAGE)?;
        let mut groups = Vec::with_capacity(dispatches.len());
        for (pool, list, _) in &dispatches {
            groups.push(self.copy.bind(self.runtime.device(), |name| match name {
                "ranges" => Some(wgpu::BufferBinding {
                    buffer: &lists,
                    offset: list.start,
                    size: wgpu::BufferSize::new(list.end - list.start),
                }),
                _ => Some(wgpu::BufferBinding {
                    buffer: &self.pools[*pool],
                    offset: 0,
                    size: wgpu::BufferSize::new(u64::from(self.desc.page_count) * self.desc.bytes()[*pool]),
                }),
            })?);
        }
        let label = Some("page_copy");
        let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor { label, timestamp_writes: None });
        pass.set_pipeline(&self.copy.pipeline);
        for ((_, list, workgroups), group) in dispatches.into_iter().zip(&groups) {
            pass.set_bind_group(0, group, &[]);
            pass.dispatch_workgroups(workgroups, ((list.end - list.start) / size_of::<Range>() as u64) as u32, 1);
        }
        Ok(())
    }

    /// The words of a copy: the whole page, or where tokens lie together, just theirs.
    fn range(&self, pool: usize, copy: &PageCopy) -> Range {
        let page = self.desc.bytes()[pool];
        let bytes = match self.desc.order {
            PageOrder::Hnd => page,
            PageOrder::Nhd => {
                let token = [self.desc.k_layout(), self.desc.v_layout()][pool].seq * self.desc.dtype.size();
                u64::from(copy.slots) * token
            }
        };
        // A pool is at most 2³² elements of 2 or 4 bytes, so that words fit in 32 bits.
        let word = |page_id: u32| (u64::from(page_id) * page / 4) as u32;
        Range { start: word(copy.from), to: word(copy.to), words: bytes.div_ceil(4) as u32 }
    }

    /// The bytes of these pages, in this order, after all work submitted so far: of each page its K, then its V, as they lie in
    /// the pools, [`PagedCacheDesc::page_bytes`] together.
    pub async fn swap_out(&self, pages: &[u32]) -> Result<Vec<u8>> {
        self.runtime.check_lost()?;
        self.desc.check_pages(pages)?;
        let bytes = self.swapped(pages);
        let usage = wgpu::BufferUsages::COPY_DST | wgpu::BufferUsages::COPY_SRC;
        let staging = self.runtime.buffer("pages to swap out", bytes, usage)?;
        let mut encoder = self.runtime.device().create_command_encoder(&Default::default());
        self.each_piece(pages, |pool, at, staged, bytes| {
            encoder.copy_buffer_to_buffer(pool, at, &staging, staged, bytes);
        });
        self.runtime.queue().submit([encoder.finish()]);
        self.runtime.read(&staging, bytes).await
    }

    /// Writes what [`swap_out`](PagedCache::swap_out) returned into these pages, as many, each once, not necessarily the same.
    /// Submits, and does not wait: work submitted later finds them there.
    pub fn swap_in(&self, pages: &[u32], bytes: &[u8]) -> Result<()> {
        self.runtime.check_lost()?;
        self.desc.check_pages(pages)?;
        let expected = self.swapped(pages);
        if bytes.len() as u64 != expected {
            return Err(Error::shape("bytes", format!("{expected} for {} pages", pages.len()), bytes.len()));
        }
        let mut seen = HashSet::with_capacity(pages.len());
        if let Some(twice) = pages.iter().find(|page| !seen.insert(**page)) {
            return Err(Error::shape("pages", "each page once", format!("page {twice} twice")));
        }
        let staging = self.runtime.upload("pages to swap in", bytes, wgpu::BufferUsages::COPY_SRC)?;
        let mut encoder = self.runtime.device().create_command_encoder(&Default::default());
        self.each_piece(pages, |pool, at, staged, bytes| {
            encoder.copy_buffer_to_buffer(&staging, staged, pool, at, bytes);
        });
        self.runtime.queue().submit([encoder.finish()]);
        Ok(())
    }

    fn swapped(&self, pages: &[u32]) -> u64 {
        (pages.len() as u64).saturating_mul(self.desc.page_bytes())
    }

    /// Pool, offset in it, offset among the swapped bytes, and size, of each page of K and V.
    fn each_piece(&self, pages: &[u32], mut copy: impl FnMut(&wgpu::Buffer, u64, u64, u64)) {
        let mut staged = 0;
        for page in pages {
            for (pool, bytes) in self.pools.iter().zip(self.desc.bytes()) {
                copy(pool, u64::from(*page) * bytes, staged, bytes);
                staged += bytes;
            }
        }
    }
}

/// Cuts copies into runs whose members can be done at once: none reads or writes what another one writes.
fn waves(copies: &[PageCopy]) -> Vec<Vec<PageCopy>> {
    let mut waves = Vec::new();
    let mut wave = Vec::new();
    let (mut read, mut written) = (HashSet::new(), HashSet::new());
    for copy in copies.iter().filter(|copy| copy.from != copy.to && copy.slots > 0) {
        if written.contains(&copy.from) || read.contains(&copy.to) || written.contains(&copy.to) {
            waves.push(std::mem::take(&mut wave));
            read.clear();
            written.clear();
        }
        read.insert(copy.from);
        written.insert(copy.to);
        wave.push(*copy);
    }
    waves.push(wave);
    waves
}
