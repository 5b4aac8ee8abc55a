//! Which page belongs to whom: the page allocator of a pool. Pure CPU; the pool itself is [`PagedCache`](crate::PagedCache).
//!
//! A sequence holds the pages of its tokens, sequences may share pages, and the prefix cache keeps pages of known content
//! beyond the sequences that made them. Two rules hold everything together:
//!
//! - Sharing starts at token 0: sequences that share a page share all pages before it. So a page of the prefix cache that
//!   some sequence holds has all pages before it held as well, and what no sequence holds can be evicted from its end.
//! - Only a page with one holder, which is not in the prefix cache, is written. Any other is copied first.
//!
//! Methods: Kwon et al., *PagedAttention* (2023) for paging, sharing and copy-on-write; Zheng et al., *SGLang* (2024) for the
//! prefix tree with eviction of least recently used leaves.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::cache::PageTable;
use crate::error::{Error, Result};
use crate::ops::attention::MAX_LEN;

/// Names one sequence of one [`Pages`], for ever: once freed, it names nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SequenceId {
    index: usize,
    serial: u64,
}

/// Every sequence of the process has a serial number of its own.
static NEXT_SERIAL: AtomicU64 = AtomicU64::new(0);

/// A copy to be done on the device, [`PagedCache::record_copies`](crate::PagedCache::record_copies), before the tokens are
/// written for which [`Pages::append`] made room.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PageCopy {
    /// Page to read.
    pub from: u32,
    /// Page to write.
    pub to: u32,
    /// Slots that hold tokens, the first of the page; what the others hold afterwards does not matter.
    pub slots: u32,
}

/// Where the pages of a pool are. `used + cached + free = pages`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PageStats {
    /// All pages.
    pub pages: u32,
    /// Held by at least one sequence.
    pub used: u32,
    /// Of these, held by more than one sequence.
    pub shared: u32,
    /// Held by the prefix cache alone: evicted when pages are needed.
    pub cached: u32,
    /// Held by nobody.
    pub free: u32,
    /// Sequences.
    pub sequences: usize,
    /// Tokens of all sequences; those in shared pages count once for each sequence.
    pub tokens: u64,
    /// Slots of used pages in which no sequence has a token; a shared page counts once.
    pub wasted_slots: u64,
}

/// Buffers that [`Pages::table`] fills, to be kept from step to step: then nothing is allocated.
#[derive(Clone, Debug, Default)]
pub struct TableBuffer {
    offsets: Vec<u32>,
    pages: Vec<u32>,
    lens: Vec<u32>,
}

/// The page allocator: sequences, their pages, the prefix cache.
///
/// ```
/// use wgpu_attention::{PageCopy, Pages, TableBuffer};
/// # fn main() -> wgpu_attention::Result<()> {
/// let mut pages = Pages::new(8, 4)?; // 8 pages of 4 tokens
/// let (mut copies, mut buffer) = (Vec::new(), TableBuffer::default());
///
/// let prompt = [5, 6, 7, 8, 9, 10];
/// let (first, found) = pages.create_with_prefix(&prompt[..5]); // all but the last, see there
/// assert_eq!(found, 0);
/// pages.append(&[(first, 6)], &mut copies)?;
/// pages.publish(first, &prompt)?; // once their K and V are recorded to be written
///
/// // The same beginning: one whole page is there already.
/// let (second, found) = pages.create_with_prefix(&prompt[..5]);
/// assert_eq!((found, pages.len(second)?), (4, 4));
///
/// // Two continuations of one sequence: the page that both would write is copied.
/// let third = pages.fork(first)?;
/// pages.append(&[(first, 1), (second, 2), (third, 1)], &mut copies)?;
/// assert_eq!(copies, [PageCopy { from: 1, to: 2, slots: 2 }]);
/// let (table, lens) = pages.table(&[first, second, third], &mut buffer)?;
/// assert_eq!((table.pages, lens), ([0, 2, 0, 3, 0, 1].as_slice(), [7, 6, 7].as_slice()));
/// # Ok(()) }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pages {
    page_count: u32,
    page_len: u32,
    /// Pages that were ever used, by id.
    pages: Vec<Page>,
    /// Of these, the ones that nobody holds.
    free: Vec<u32>,
    sequences: Vec<Option<Sequence>>,
    vacant: Vec<usize>,
    /// The prefix cache: pages by content.
    published: HashMap<Content, u32>,
    /// Pages in the prefix cache that no sequence holds.
    unheld: u32,
    /// Of these, the ones that can be evicted now, since no cached page follows them, by time of release.
    leaves: BTreeMap<u64, u32>,
    clock: u64,
}

/// The page before, or [`ROOT`], then the tokens. Pages before lie in the cache at least as long, so that equal keys are
/// equal from token 0 on: what a hash leads to is compared as a whole.
type Content = Arc<[u32]>;

const ROOT: u32 = u32::MAX;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Page {
    /// Sequences that hold it.
    holders: u32,
    /// Scratch of `append`: sequences of the batch that write to it.
    writers: u32,
    published: Option<Published>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Published {
    content: Content,
    /// Published pages that follow this one.
    children: u32,
    /// When the last sequence let go of it.
    released: u64,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Sequence {
    serial: u64,
    pages: Vec<u32>,
    len: u32,
    /// Scratch of `append`: seen in the batch.
    seen: bool,
}

impl Pages {
    /// An allocator of `page_count` pages, ids 0 to `page_count − 1`, of `page_len` tokens each, at least 1.
    pub fn new(page_count: u32, page_len: u32) -> Result<Self> {
        Error::unless_in("page_len", page_len, MAX_LEN)?;
        Ok(Pages {
            page_count,
            page_len,
            pages: Vec::new(),
            free: Vec::new(),
            sequences: Vec::new(),
            vacant: Vec::new(),
            published: HashMap::new(),
            unheld: 0,
            leaves: BTreeMap::new(),
            clock: 0,
        })
    }

    /// Tokens of a page.
    pub fn page_len(&self) -> u32 {
        self.page_len
    }

    /// Pages of the pool.
    pub fn page_count(&self) -> u32 {
        self.page_count
    }

    /// Pages that [`append`](Pages::append) can take: those that nobody holds, and those that the prefix cache alone holds.
    pub fn available(&self) -> u32 {
        self.page_count - self.pages.len() as u32 + self.free.len() as u32 + self.unheld
    }

    /// An empty sequence.
    pub fn create(&mut self) -> SequenceId {
        self.insert(Vec::new(), 0)
    }

    /// A sequence that begins with what the prefix cache has of `tokens`: the longest run of whole pages with just these
    /// tokens. Returns how many tokens that is, a multiple of `page_len`; their K and V need not be computed.
    ///
    /// A model needs at least one row to say what comes next: give all tokens of a prompt but the last.
    pub fn create_with_prefix(&mut self, tokens: &[u32]) -> (SequenceId, u32) {
        let mut found = Vec::new();
        let mut key = Vec::with_capacity(1 + self.page_len.min(tokens.len() as u32) as usize);
        for chunk in tokens.chunks_exact(self.page_len as usize).take((MAX_LEN / self.page_len) as usize) {
            content_into(&mut key, found.last(), chunk);
            let Some(page) = self.published.get(key.as_slice()) else { break };
            found.push(*page);
        }
        for page in &found {
            self.hold(*page);
        }
        let len = found.len() as u32 * self.page_len;
        (self.insert(found, len), len)
    }

    /// Puts the whole pages of `tokens`, the sequence's first ones, into the prefix cache. Publish once the K and V of these
    /// tokens are written or recorded to be. What has been published before is not looked up again, only compared.
    ///
    /// A token here is any number that, with those before it, decides K and V. Where the cache has an equal page already, all
    /// sequences that hold this one take that one and this one becomes free, so tables made before are out of date.
    ///
    /// More tokens than the sequence has, or others than were published of it before, are an error; nothing is changed then.
    pub fn publish(&mut self, id: SequenceId, tokens: &[u32]) -> Result<()> {
        let sequence = self.sequence(id)?;
        if tokens.len() > sequence.len as usize {
            let expected = format!("at most the {} of the sequence", sequence.len);
            return Err(Error::shape("tokens", expected, tokens.len()));
        }
        let chunks = tokens.chunks_exact(self.page_len as usize);
        let mut count = 0_usize;
        for (page, chunk) in sequence.pages.iter().zip(chunks.clone()) {
            let Some(published) = &self.pages[*page as usize].published else { break };
            if published.content[1..] != *chunk {
                let first = count as u64 * u64::from(self.page_len);
                let expected = format!("those of page {count} (from token {first} on) that were published before");
                return Err(Error::shape("tokens", expected, "others"));
            }
            count += 1;
        }
        let mut before = count.checked_sub(1).map(|last| sequence.pages[last]);
        let mut key = Vec::with_capacity(1 + self.page_len.min(tokens.len() as u32) as usize);
        for (i, chunk) in chunks.enumerate().skip(count) {
            content_into(&mut key, before.as_ref(), chunk);
            let own = self.sequence(id)?.pages[i];
            match self.published.get(key.as_slice()) {
                Some(equal) => {
                    before = Some(*equal);
                    self.replace(i, own, *equal);
                }
                None => {
                    let content: Content = key.as_slice().into();
                    self.published.insert(content.clone(), own);
                    self.pages[own as usize].published = Some(Published { content, children: 0, released: 0 });
                    if let Some(before) = before.and_then(|before| self.pages[before as usize].published.as_mut()) {
                        before.children += 1;
                    }
                    before = Some(own);
                }
            }
        }
        Ok(())
    }

    /// Makes room for `count` more tokens of each sequence, and adds to `copies` what must be copied on the device before
    /// they are written: a last page that is not full, and which others hold too or which was published. Copies come in the
    /// order in which they are to be done.
    ///
    /// All or nothing: too few pages are [`Error::OutOfPages`], a sequence twice in the batch or one longer than 2²⁹ tokens is
    /// an error as well, and nothing is changed then.
    pub fn append(&mut self, batch: &[(SequenceId, u32)], copies: &mut Vec<PageCopy>) -> Result<()> {
        let needed = self.count_needed(batch);
        for (id, _) in batch {
            let Ok(sequence) = self.sequence_mut(*id) else { continue };
            sequence.seen = false;
            if let Some(last) = sequence.pages.last().copied() {
                self.pages[last as usize].writers = 0;
            }
        }
        let (needed, free) = (needed?, self.available());
        if needed > u64::from(free) {
            return Err(Error::OutOfPages { needed: u32::try_from(needed).unwrap_or(u32::MAX), free });
        }
        for (id, count) in batch.iter().filter(|(_, count)| *count > 0) {
            let (len, last) = (self.sequence(*id)?.len, self.sequence(*id)?.pages.last().copied());
            let slots = len % self.page_len;
            if let Some(from) = last.filter(|last| slots > 0 && self.must_copy(*last, 0)) {
                let to = self.take_page();
                copies.push(PageCopy { from, to, slots });
                self.release(from);
                if let Some(last) = self.sequence_mut(*id)?.pages.last_mut() {
                    *last = to;
                }
            }
            let (len, more) = (len + count, (len + count).div_ceil(self.page_len) - len.div_ceil(self.page_len));
            for _ in 0..more {
                let page = self.take_page();
                self.sequence_mut(*id)?.pages.push(page);
            }
            self.sequence_mut(*id)?.len = len;
        }
        Ok(())
    }

    /// Pages that a batch needs. Marks sequences and pages on the way.
    fn count_needed(&mut self, batch: &[(SequenceId, u32)]) -> Result<u64> {
        let page_len = self.page_len;
        let mut needed = 0;
        for (id, count) in batch {
            let sequence = self.sequence_mut(*id)?;
            if std::mem::replace(&mut sequence.seen, true) {
                return Err(Error::shape("batch", "each sequence once", "one of them twice"));
            }
            let (len, last) = (sequence.len, sequence.pages.last().copied());
            let longer = u64::from(len) + u64::from(*count);
            if longer > u64::from(MAX_LEN) {
                let hint = "positions must fit in 31 bits";
                return Err(Error::limit("tokens of a sequence", MAX_LEN.into(), longer, hint));
            }
            needed += longer.div_ceil(page_len.into()) - u64::from(len.div_ceil(page_len));
            if let Some(last) = last.filter(|_| *count > 0 && !len.is_multiple_of(page_len)) {
                needed += u64::from(self.must_copy(last, self.pages[last as usize].writers));
                self.pages[last as usize].writers += 1;
            }
        }
        Ok(needed)
    }

    /// Whether a holder of this page must copy it to write to it, after `copied` others did: the last one need not, unless
    /// the prefix cache holds it too.
    fn must_copy(&self, page: u32, copied: u32) -> bool {
        let page = &self.pages[page as usize];
        page.published.is_some() || page.holders > 1 + copied
    }

    /// A sequence with the same tokens in the same pages; nothing is copied until one of the two writes.
    pub fn fork(&mut self, id: SequenceId) -> Result<SequenceId> {
        let Sequence { pages, len, .. } = self.sequence(id)?.clone();
        for page in &pages {
            self.hold(*page);
        }
        Ok(self.insert(pages, len))
    }

    /// Takes back all but the first `len` tokens, as speculative decoding does, and lets go of pages no longer needed.
    pub fn truncate(&mut self, id: SequenceId, len: u32) -> Result<()> {
        let page_len = self.page_len;
        let sequence = self.sequence_mut(id)?;
        if len > sequence.len {
            return Err(Error::shape("len", format!("at most the sequence's {}", sequence.len), len));
        }
        sequence.len = len;
        let dropped = sequence.pages.split_off(len.div_ceil(page_len) as usize);
        self.release_all(&dropped);
        Ok(())
    }

    /// Ends a sequence. Pages that it published stay in the prefix cache until they are needed.
    pub fn free(&mut self, id: SequenceId) -> Result<()> {
        self.sequence(id)?;
        if let Some(sequence) = self.sequences[id.index].take() {
            self.vacant.push(id.index);
            self.release_all(&sequence.pages);
        }
        Ok(())
    }

    /// Tokens of a sequence.
    pub fn len(&self, id: SequenceId) -> Result<u32> {
        Ok(self.sequence(id)?.len)
    }

    /// Pages of a sequence, just as many as its tokens need.
    pub fn pages(&self, id: SequenceId) -> Result<&[u32]> {
        Ok(&self.sequence(id)?.pages)
    }

    /// Page and slot of the token at `position` of a sequence.
    pub fn slot(&self, id: SequenceId, position: u32) -> Result<(u32, u32)> {
        let sequence = self.sequence(id)?;
        match position < sequence.len {
            true => Ok((sequence.pages[(position / self.page_len) as usize], position % self.page_len)),
            false => Err(Error::shape("position", format!("less than the sequence's {}", sequence.len), position)),
        }
    }

    /// The page table and the lengths of these sequences, in this order, for [`Batch::paged`](crate::Batch::paged). A sequence
    /// may come more than once. Anything that changes the sequences makes a table out of date.
    pub fn table<'a>(&self, ids: &[SequenceId], buffer: &'a mut TableBuffer) -> Result<(PageTable<'a>, &'a [u32])> {
        let TableBuffer { offsets, pages, lens } = buffer;
        offsets.clear();
        pages.clear();
        lens.clear();
        offsets.push(0);
        for id in ids {
            let sequence = self.sequence(*id)?;
            pages.extend_from_slice(&sequence.pages);
            lens.push(sequence.len);
            let end = u32::try_from(pages.len()).map_err(|_| {
                Error::limit("pages of a table", u32::MAX.into(), pages.len() as u64, "split the batch")
            })?;
            offsets.push(end);
        }
        Ok((PageTable { page_len: self.page_len, offsets, pages }, lens))
    }

    /// Counts everything: proportional to the pages.
    pub fn stats(&self) -> PageStats {
        let mut filled = vec![0; self.pages.len()]; // slots in which some sequence has a token
        let mut stats = PageStats { pages: self.page_count, cached: self.unheld, ..PageStats::default() };
        stats.free = self.available() - self.unheld;
        for sequence in self.sequences.iter().flatten() {
            stats.sequences += 1;
            stats.tokens += u64::from(sequence.len);
            let mut left = sequence.len;
            for page in &sequence.pages {
                let here = left.min(self.page_len);
                let filled = &mut filled[*page as usize];
                *filled = here.max(*filled);
                left -= here;
            }
        }
        for (page, filled) in self.pages.iter().zip(filled).filter(|(page, _)| page.holders > 0) {
            stats.used += 1;
            stats.shared += u32::from(page.holders > 1);
            stats.wasted_slots += u64::from(self.page_len - filled);
        }
        stats
    }

    fn find(&self, id: SequenceId) -> Option<&Sequence> {
        self.sequences.get(id.index)?.as_ref().filter(|sequence| sequence.serial == id.serial)
    }

    fn sequence(&self, id: SequenceId) -> Result<&Sequence> {
        self.find(id)
            .ok_or_else(|| Error::shape("sequence", "one of these pages that was not freed", format!("{id:?}")))
    }

    fn sequence_mut(&mut self, id: SequenceId) -> Result<&mut Sequence> {
        self.sequence(id)?; // the error
        Ok(self.sequences[id.index].as_mut().expect("just found"))
    }

    fn insert(&mut self, pages: Vec<u32>, len: u32) -> SequenceId {
        let serial = NEXT_SERIAL.fetch_add(1, Ordering::Relaxed);
        let sequence = Some(Sequence { serial, pages, len, seen: false });
        let index = match self.vacant.pop() {
            Some(index) => index,
            None => {
                self.sequences.push(None);
                self.sequences.len() - 1
            }
        };
        self.sequences[index] = sequence;
        SequenceId { index, serial }
    }

    /// One holder more.
    fn hold(&mut self, page: u32) {
        let held = &mut self.pages[page as usize];
        held.holders += 1;
        if let Some(published) = held.published.as_ref().filter(|_| held.holders == 1) {
            self.unheld -= 1;
            if published.children == 0 {
                self.leaves.remove(&published.released);
            }
        }
    }

    /// One holder less.
    fn release(&mut self, page: u32) {
        let released = &mut self.pages[page as usize];
        released.holders -= 1;
        if released.holders > 0 {
            return;
        }
        match &mut released.published {
            None => self.free.push(page),
            Some(published) => {
                self.clock += 1;
                published.released = self.clock;
                self.unheld += 1;
                if published.children == 0 {
                    self.leaves.insert(self.clock, page);
                }
            }
        }
    }

    /// From the last on, so that the first is the first to be taken again.
    fn release_all(&mut self, pages: &[u32]) {
        for page in pages.iter().rev() {
            self.release(*page);
        }
    }

    /// All sequences that have `own` as page `i` take `equal` for it.
    fn replace(&mut self, i: usize, own: u32, equal: u32) {
        for index in 0..self.sequences.len() {
            let Some(page) = self.sequences[index].as_mut().and_then(|sequence| sequence.pages.get_mut(i)) else {
                continue;
            };
            if *page == own {
                *page = equal;
                self.hold(equal);
                self.release(own);
            }
        }
    }

    /// A page that nobody holds, evicted from the prefix cache if it must be; `append` has counted.
    fn take_page(&mut self) -> u32 {
        let page = match self.free.pop() {
            Some(page) => page,
            None if self.pages.len() < self.page_count as usize => {
                self.pages.push(Page::default());
                self.pages.len() as u32 - 1
            }
            None => self.evict(),
        };
        self.pages[page as usize].holders = 1;
        page
    }

    /// Takes the page out of the prefix cache that has been without holders for longest, of those that no other follows.
    fn evict(&mut self) -> u32 {
        let (_, page) = self.leaves.pop_first().expect("`append` has counted the pages");
        let published = self.pages[page as usize].published.take().expect("leaves are published");
        self.published.remove(&published.content);
        self.unheld -= 1;
        let before = published.content[0];
        if before != ROOT {
            let page = &mut self.pages[before as usize];
            let published = page.published.as_mut().expect("pages before a published one are published");
            published.children -= 1;
            if published.children == 0 && page.holders == 0 {
                self.leaves.insert(published.released, before);
            }
        }
        page
    }
}

fn content_into(key: &mut Vec<u32>, before: Option<&u32>, tokens: &[u32]) {
    key.clear();
    key.push(before.copied().unwrap_or(ROOT));
    key.extend_from_slice(tokens);
}
