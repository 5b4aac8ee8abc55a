//! The page allocator against a naive model: every sequence's tokens as a plain vector, and a pool to which copies and writes
//! are applied in the order in which a device would.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;
use wgpu_attention::*;

/// What a token's K and V would be: they depend on all tokens up to it.
fn value_of(tokens: &[u32]) -> u64 {
    tokens
        .iter()
        .fold(17, |hash: u64, token| (hash ^ u64::from(*token)).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(23))
}

/// A page of the prefix cache that can be found.
#[derive(Clone, Copy, Debug)]
struct Known {
    page: u32,
    /// The operation after which no sequence held it any more; `None` while one does.
    unheld_since: Option<usize>,
}

struct Model {
    pages: Pages,
    pool: Vec<Vec<u64>>,
    live: Vec<(SequenceId, Vec<u32>)>,
    freed: Vec<SequenceId>,
    /// All prefixes that were ever published, in whole pages, and those that the cache still has.
    published: BTreeSet<Vec<u32>>,
    known: BTreeMap<Vec<u32>, Known>,
    time: usize,
}

#[derive(Clone, Debug)]
enum Op {
    Create,
    CreateWithPrefix { of: usize, cut: usize, tail: Vec<u32> },
    Append(Vec<(usize, Vec<u32>)>),
    Fork(usize),
    Truncate(usize, usize),
    Free(usize),
    Publish(usize, usize),
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let tokens = |most| prop::collection::vec(0u32..2, 0..=most);
    let op = prop_oneof![
        1 => Just(Op::Create),
        3 => (any::<usize>(), 0usize..8, tokens(3)).prop_map(|(of, cut, tail)| Op::CreateWithPrefix { of, cut, tail }),
        6 => prop::collection::vec((any::<usize>(), tokens(7)), 1..4).prop_map(Op::Append),
        2 => any::<usize>().prop_map(Op::Fork),
        2 => (any::<usize>(), 0usize..6).prop_map(|(which, back)| Op::Truncate(which, back)),
        3 => any::<usize>().prop_map(Op::Free),
        4 => (any::<usize>(), 0usize..4).prop_map(|(which, back)| Op::Publish(which, back)),
    ];
    prop::collection::vec(op, 1..80)
}

impl Model {
    fn new(page_count: u32, page_len: u32) -> Self {
        Model {
            pages: Pages::new(page_count, page_len).unwrap(),
            pool: vec![vec![0; page_len as usize]; page_count as usize],
            live: Vec::new(),
            freed: Vec::new(),
            published: BTreeSet::new(),
            known: BTreeMap::new(),
            time: 0,
        }
    }

    fn page_len(&self) -> usize {
        self.pages.page_len() as usize
    }

    fn held(&self) -> BTreeMap<u32, usize> {
        let mut held = BTreeMap::new();
        for (id, _) in &self.live {
            for page in self.pages.pages(*id).unwrap() {
                *held.entry(*page).or_default() += 1;
            }
        }
        held
    }

    /// Pages and copies that appending needs, by going through it with sets.
    fn needed(&self, batch: &[(SequenceId, u32)]) -> (u32, usize) {
        let mut tables: Vec<Vec<u32>> =
            self.live.iter().map(|(id, _)| self.pages.pages(*id).unwrap().to_vec()).collect();
        let (mut fresh, mut copies) = (1000, 0);
        for (id, count) in batch.iter().filter(|(_, count)| *count > 0) {
            let at = self.live.iter().position(|(other, _)| other == id).unwrap();
            let len = self.live[at].1.len();
            if !len.is_multiple_of(self.page_len()) {
                let last = *tables[at].last().unwrap();
                let holders = tables.iter().filter(|table| table.contains(&last)).count();
                if holders > 1 || self.known.values().any(|known| known.page == last) {
                    *tables[at].last_mut().unwrap() = fresh;
                    fresh += 1;
                    copies += 1;
                }
            }
            while tables[at].len() * self.page_len() < len + *count as usize {
                tables[at].push(fresh);
                fresh += 1;
            }
        }
        (fresh - 1000, copies)
    }

    fn append(&mut self, batch: &[(usize, Vec<u32>)]) {
        let mut chosen = BTreeMap::new();
        let mut repeated = false;
        let mut request = Vec::new();
        for (which, tokens) in batch {
            let at = which % self.live.len();
            repeated |= chosen.insert(at, tokens.clone()).is_some();
            request.push((self.live[at].0, tokens.len() as u32));
        }
        let (before, stats) = (self.pages.clone(), self.pages.stats());
        let mut copies = vec![PageCopy { from: 9, to: 9, slots: 9 }];
        let result = self.pages.append(&request, &mut copies);
        if repeated {
            assert!(matches!(result, Err(Error::Shape { .. })), "{result:?}");
            assert_eq!((&self.pages, copies.len()), (&before, 1));
            return;
        }
        let (needed, copied) = {
            let after = std::mem::replace(&mut self.pages, before.clone());
            let answer = self.needed(&request);
            self.pages = after;
            answer
        };
        if needed > stats.free + stats.cached {
            match result {
                Err(Error::OutOfPages { needed: said, free }) => {
                    assert_eq!((said, free), (needed, stats.free + stats.cached))
                }
                other => panic!("{other:?} with {stats:?}, {needed} needed"),
            }
            assert_eq!((&self.pages, copies.len()), (&before, 1));
            return;
        }
        result.unwrap();
        assert_eq!(copies.len() - 1, copied);
        for copy in &copies[1..] {
            assert!((1..self.pages.page_len()).contains(&copy.slots) && copy.from != copy.to);
            // The device writes anything into the slots beyond.
            let mut page = vec![0xdead; self.page_len()];
            page[..copy.slots as usize].copy_from_slice(&self.pool[copy.from as usize][..copy.slots as usize]);
            self.pool[copy.to as usize] = page;
        }
        for (at, more) in chosen {
            for token in more {
                let (id, tokens) = &mut self.live[at];
                tokens.push(token);
                let (page, slot) = self.pages.slot(*id, tokens.len() as u32 - 1).unwrap();
                self.pool[page as usize][slot as usize] = value_of(tokens);
            }
        }
        // Evicted: just as many as had to be, and those that were without holders for longest.
        let evicted = needed.saturating_sub(stats.free);
        let found = self.find();
        let gone: Vec<_> = self.known.iter().filter(|(prefix, _)| !found.contains_key(*prefix)).collect();
        assert_eq!(gone.len() as u32, evicted);
        let last = gone.iter().map(|(_, known)| known.unheld_since.expect("held pages stay")).max();
        let stays = self.known.iter().filter(|(prefix, _)| found.contains_key(*prefix));
        let first = stays.filter_map(|(_, known)| known.unheld_since).min();
        assert!(last.zip(first).is_none_or(|(last, first)| last <= first), "{last:?} went before {first:?}");
        self.known.retain(|prefix, _| found.contains_key(prefix));
    }

    /// What the prefix cache has, seen from outside.
    fn find(&self) -> BTreeMap<Vec<u32>, u32> {
        let mut probe = self.pages.clone();
        let mut found = BTreeMap::new();
        for prefix in &self.published {
            let (id, len) = probe.create_with_prefix(prefix);
            if len as usize == prefix.len() {
                found.insert(prefix.clone(), *probe.pages(id).unwrap().last().unwrap());
            }
        }
        found
    }

    fn step(&mut self, op: &Op) {
        self.time += 1;
        let pick = |which: usize, live: &Vec<(SequenceId, Vec<u32>)>| which % live.len();
        match op {
            Op::Create => self.live.push((self.pages.create(), Vec::new())),
            Op::CreateWithPrefix { of, cut, tail } => {
                let all: Vec<_> = self.published.iter().chain(self.live.iter().map(|(_, tokens)| tokens)).collect();
                let mut tokens = if all.is_empty() { Vec::new() } else { all[of % all.len()].clone() };
                tokens.truncate(tokens.len().saturating_sub(*cut));
                tokens.extend(tail);
                let whole = (1..=tokens.len() / self.page_len()).map(|pages| pages * self.page_len());
                let want = whole.take_while(|len| self.known.contains_key(&tokens[..*len])).last().unwrap_or(0);
                let (id, found) = self.pages.create_with_prefix(&tokens);
                assert_eq!((found as usize, self.pages.len(id).unwrap() as usize), (want, want));
                tokens.truncate(want);
                self.live.push((id, tokens));
            }
            _ if self.live.is_empty() => {}
            Op::Append(batch) => self.append(batch),
            Op::Fork(which) => {
                let (id, tokens) = self.live[pick(*which, &self.live)].clone();
                let fork = self.pages.fork(id).unwrap();
                assert_eq!(self.pages.pages(fork).unwrap(), self.pages.pages(id).unwrap());
                self.live.push((fork, tokens));
            }
            Op::Truncate(which, back) => {
                let at = pick(*which, &self.live);
                let (id, tokens) = &mut self.live[at];
                let before = self.pages.clone();
                let error = self.pages.truncate(*id, tokens.len() as u32 + 1).unwrap_err();
                assert!(matches!(error, Error::Shape { .. }) && self.pages == before, "{error}");
                tokens.truncate(tokens.len().saturating_sub(*back));
                self.pages.truncate(*id, tokens.len() as u32).unwrap();
            }
            Op::Free(which) => {
                let (id, _) = self.live.swap_remove(pick(*which, &self.live));
                self.pages.free(id).unwrap();
                self.freed.push(id);
            }
            Op::Publish(which, back) => {
                let (id, tokens) = &self.live[pick(*which, &self.live)];
                let tokens = &tokens[..tokens.len().saturating_sub(*back)];
                self.pages.publish(*id, tokens).unwrap();
                for count in 1..=tokens.len() / self.page_len() {
                    self.published.insert(tokens[..count * self.page_len()].to_vec());
                }
                let own = self.pages.pages(*id).unwrap();
                for (i, page) in own[..tokens.len() / self.page_len()].iter().enumerate() {
                    let known = Known { page: *page, unheld_since: None };
                    self.known.insert(tokens[..(i + 1) * self.page_len()].to_vec(), known);
                }
            }
        }
        self.check();
    }

    fn check(&mut self) {
        let page_len = self.page_len();
        let content = |page: u32, slot: usize| self.pool[page as usize][slot];
        // Every sequence reads what it wrote.
        let mut filled: BTreeMap<u32, usize> = BTreeMap::new();
        for (id, tokens) in &self.live {
            let pages = self.pages.pages(*id).unwrap();
            assert_eq!(self.pages.len(*id).unwrap() as usize, tokens.len());
            assert_eq!(pages.len(), tokens.len().div_ceil(page_len));
            for position in 0..tokens.len() {
                let (page, slot) = (pages[position / page_len], position % page_len);
                assert_eq!(self.pages.slot(*id, position as u32).unwrap(), (page, slot as u32));
                assert_eq!(content(page, slot), value_of(&tokens[..=position]), "{id:?} at {position}");
                let filled = filled.entry(page).or_default();
                *filled = (slot + 1).max(*filled);
            }
            assert!(self.pages.slot(*id, tokens.len() as u32).is_err());
        }
        // What is known is found, in the page in which it was, with the content that it had; nothing else is.
        let held = self.held();
        let found = self.find();
        let known: BTreeMap<_, _> = self.known.iter().map(|(prefix, known)| (prefix.clone(), known.page)).collect();
        assert_eq!(found, known);
        let mut unheld = BTreeSet::new();
        for (prefix, known) in &mut self.known {
            for slot in 0..page_len {
                let tokens = &prefix[..prefix.len() - page_len + slot + 1];
                assert_eq!(self.pool[known.page as usize][slot], value_of(tokens), "{prefix:?}");
            }
            match held.contains_key(&known.page) {
                true => known.unheld_since = None,
                false => {
                    known.unheld_since.get_or_insert(self.time);
                    assert!(unheld.insert(known.page), "one page, two contents");
                }
            }
        }
        // No page lost, none twice.
        let stats = self.pages.stats();
        let want = PageStats {
            pages: self.pages.page_count(),
            used: held.len() as u32,
            shared: held.values().filter(|holders| **holders > 1).count() as u32,
            cached: unheld.len() as u32,
            free: self.pages.page_count() - (held.len() + unheld.len()) as u32,
            sequences: self.live.len(),
            tokens: self.live.iter().map(|(_, tokens)| tokens.len() as u64).sum(),
            wasted_slots: filled.values().map(|filled| (page_len - filled) as u64).sum(),
        };
        assert_eq!(stats, want);
        assert_eq!(self.pages.available(), stats.free + stats.cached);
        // The table is that of the sequences; freed ids are refused everywhere.
        let ids: Vec<_> = self.live.iter().map(|(id, _)| *id).collect();
        let mut buffer = TableBuffer::default();
        let (table, lens) = self.pages.table(&ids, &mut buffer).unwrap();
        table.validate(lens.iter().copied()).unwrap();
        for (b, (id, tokens)) in self.live.iter().enumerate() {
            assert_eq!((table.of(b), lens[b] as usize), (self.pages.pages(*id).unwrap(), tokens.len()));
        }
        for id in &self.freed {
            let before = self.pages.clone();
            assert!(self.pages.len(*id).is_err() && self.pages.pages(*id).is_err() && self.pages.slot(*id, 0).is_err());
            assert!(self.pages.table(&[*id], &mut buffer).is_err());
            let pages = &mut self.pages;
            assert!(pages.fork(*id).is_err() && pages.truncate(*id, 0).is_err() && pages.free(*id).is_err());
            assert!(pages.publish(*id, &[]).is_err() && pages.append(&[(*id, 1)], &mut Vec::new()).is_err());
            let first = ids.first().map(|live| (*live, 1));
            let batch: Vec<_> = first.into_iter().chain([(*id, 1)]).collect();
            assert!(pages.append(&batch, &mut Vec::new()).is_err());
            assert_eq!(self.pages, before);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1500, ..ProptestConfig::default() })]

    #[test]
    fn random_operations_match_the_model(page_count in 0u32..14, page_len in 1u32..=5, ops in ops()) {
        let mut model = Model::new(page_count, page_len);
        for op in &ops {
            model.step(op);
        }
        for (id, _) in std::mem::take(&mut model.live) {
            model.pages.free(id).unwrap();
        }
        model.check();
    }
}

/// A sequence of these tokens, published.
fn published(pages: &mut Pages, tokens: &[u32]) -> SequenceId {
    let (id, found) = pages.create_with_prefix(tokens);
    pages.append(&[(id, tokens.len() as u32 - found)], &mut Vec::new()).unwrap();
    pages.publish(id, tokens).unwrap();
    id
}

fn found(pages: &Pages, tokens: &[u32]) -> u32 {
    pages.clone().create_with_prefix(tokens).1
}

/// Free pages go first, then the chain that was let go of first, its end before its beginning; a hit makes it young again.
#[test]
fn eviction_is_least_recently_used_and_from_the_end() {
    let mut pages = Pages::new(7, 2).unwrap();
    let (a, b, c) = ([1, 1, 1, 2, 1, 3], [2, 1, 2, 2], [3, 1]);
    for tokens in [a.as_slice(), &b, &c] {
        let id = published(&mut pages, tokens);
        pages.free(id).unwrap();
    }
    let has = |pages: &Pages| (found(pages, &a), found(pages, &b), found(pages, &c), pages.stats().free);
    assert_eq!(has(&pages), (6, 4, 2, 1));
    // The oldest chain is used once more.
    let (again, _) = pages.create_with_prefix(&a);
    pages.free(again).unwrap();
    let taker = pages.create();
    let left: Vec<_> = (0..7)
        .map(|_| {
            pages.append(&[(taker, 2)], &mut Vec::new()).unwrap();
            has(&pages)
        })
        .collect();
    let want = [(6, 4, 2, 0), (6, 2, 2, 0), (6, 0, 2, 0), (6, 0, 0, 0), (4, 0, 0, 0), (2, 0, 0, 0), (0, 0, 0, 0)];
    assert_eq!(left, want);
    match pages.append(&[(taker, 3)], &mut Vec::new()) {
        Err(Error::OutOfPages { needed: 2, free: 0 }) => {}
        other => panic!("{other:?}"),
    }
}

/// A page that a live sequence holds is not evicted, nor are those before it.
#[test]
fn held_pages_stay() {
    let mut pages = Pages::new(4, 1).unwrap();
    let long = published(&mut pages, &[1, 2, 3]);
    let (short, found_tokens) = pages.create_with_prefix(&[1, 2]);
    assert_eq!(found_tokens, 2);
    pages.free(long).unwrap();
    assert_eq!((pages.stats().cached, pages.stats().used, pages.available()), (1, 2, 2));
    let taker = pages.create();
    pages.append(&[(taker, 2)], &mut Vec::new()).unwrap();
    assert_eq!(found(&pages, &[1, 2, 3]), 2);
    assert!(matches!(pages.append(&[(taker, 1)], &mut Vec::new()), Err(Error::OutOfPages { needed: 1, free: 0 })));
    pages.free(short).unwrap();
    pages.append(&[(taker, 1)], &mut Vec::new()).unwrap();
    assert_eq!(found(&pages, &[1, 2, 3]), 1);
}

/// Equal pages after different ones are different: K and V depend on all tokens before.
#[test]
fn a_page_is_found_only_after_the_same_pages() {
    let mut pages = Pages::new(8, 2).unwrap();
    published(&mut pages, &[1, 2, 3, 4]);
    assert_eq!(found(&pages, &[3, 4]), 0);
    assert_eq!(found(&pages, &[5, 6, 3, 4]), 0);
    assert_eq!(found(&pages, &[1, 2, 3, 5]), 2);
    assert_eq!(found(&pages, &[1, 2, 3]), 2);
    published(&mut pages, &[5, 6, 3, 4]);
    let (a, b) = (pages.create_with_prefix(&[1, 2, 3, 4]).0, pages.create_with_prefix(&[5, 6, 3, 4]).0);
    assert_ne!(pages.pages(a).unwrap()[1], pages.pages(b).unwrap()[1]);
}

/// What the cache has does not change when the sequence that made it goes back into it and on.
#[test]
fn a_published_page_is_copied_before_it_is_written() {
    let mut pages = Pages::new(4, 4).unwrap();
    let id = published(&mut pages, &[1, 2, 3, 4, 5, 6, 7, 8]);
    pages.truncate(id, 6).unwrap();
    let mut copies = Vec::new();
    pages.append(&[(id, 1)], &mut copies).unwrap();
    assert_eq!(copies, [PageCopy { from: 1, to: 2, slots: 2 }]);
    assert_eq!(found(&pages, &[1, 2, 3, 4, 5, 6, 7, 8]), 8);
    // Back to the end of a page: nothing is copied, the next tokens go into a new one.
    pages.truncate(id, 4).unwrap();
    pages.append(&[(id, 1)], &mut copies).unwrap();
    assert_eq!((copies.len(), pages.pages(id).unwrap()[0]), (1, 0));
    // Other tokens for a page that was published are refused.
    let before = pages.clone();
    let error = pages.publish(id, &[1, 2, 3, 9]).unwrap_err();
    assert_eq!(
        error.to_string(),
        "tokens: expected those of page 0 (from token 0 on) that were published before, got others"
    );
    assert!(pages.publish(id, &[1, 2, 3, 4, 5, 6]).is_err(), "more than there are");
    assert_eq!(pages, before);
}

/// Two sequences that computed the same share one page once both have published it, forks included.
#[test]
fn equal_pages_become_one() {
    let mut pages = Pages::new(6, 2).unwrap();
    let (a, b) = (pages.create(), pages.create());
    pages.append(&[(a, 4), (b, 5)], &mut Vec::new()).unwrap();
    let fork = pages.fork(b).unwrap();
    pages.publish(a, &[1, 2, 3, 4]).unwrap();
    assert_eq!(pages.stats().used, 5);
    pages.publish(b, &[1, 2, 3, 4, 5]).unwrap();
    assert_eq!(pages.pages(b).unwrap(), [0, 1, 4]);
    assert_eq!(pages.pages(fork).unwrap(), [0, 1, 4]);
    assert_eq!((pages.stats().used, pages.stats().shared, pages.stats().free), (3, 3, 3));
}

/// The last of several holders writes in place; the copies are as many as the others.
#[test]
fn forks_in_one_batch_copy_once_less_than_they_are() {
    let mut pages = Pages::new(5, 4).unwrap();
    let first = pages.create();
    pages.append(&[(first, 3)], &mut Vec::new()).unwrap();
    let forks = [pages.fork(first).unwrap(), pages.fork(first).unwrap()];
    let batch = [(first, 1), (forks[0], 2), (forks[1], 1)];
    let mut copies = Vec::new();
    pages.append(&batch, &mut copies).unwrap();
    assert_eq!(copies, [PageCopy { from: 0, to: 1, slots: 3 }, PageCopy { from: 0, to: 2, slots: 3 }]);
    assert_eq!(pages.stats().used, 4);
    assert_eq!((pages.stats().shared, pages.stats().wasted_slots, pages.stats().tokens), (0, 3, 13));
}

#[test]
fn statistics_by_hand() {
    let mut pages = Pages::new(10, 4).unwrap();
    let a = published(&mut pages, &[1, 2, 3, 4, 5, 6]);
    let b = pages.fork(a).unwrap();
    pages.truncate(b, 5).unwrap();
    let c = published(&mut pages, &[9, 9, 9, 9]);
    pages.free(c).unwrap();
    let want = PageStats {
        pages: 10,
        used: 2,
        shared: 2,
        cached: 1,
        free: 7,
        sequences: 2,
        tokens: 11,
        wasted_slots: 2, // of the second page, in which A has two tokens and B one
    };
    assert_eq!(pages.stats(), want);
}

/// An id names one sequence for ever: not its successor in the same place, nor one of another allocator.
#[test]
fn ids_name_one_sequence() {
    let (mut pages, mut others) = (Pages::new(2, 1).unwrap(), Pages::new(2, 1).unwrap());
    let old = pages.create();
    pages.free(old).unwrap();
    let new = pages.create();
    assert_ne!(old, new);
    let message = pages.len(old).unwrap_err().to_string();
    assert!(message.starts_with("sequence: expected one of these pages that was not freed"), "{message}");
    let foreign = others.create();
    assert!(pages.len(foreign).is_err() && others.len(new).is_err());
    assert_eq!((pages.len(new).unwrap(), others.len(foreign).unwrap()), (0, 0));
}

/// Sizes at their ends: no overflow, no memory for pages that were never used.
#[test]
fn sizes_at_their_ends() {
    assert!(matches!(Pages::new(1, 0), Err(Error::Shape { .. })));
    assert!(matches!(Pages::new(1, u32::MAX), Err(Error::Limit { .. })));
    let mut pages = Pages::new(u32::MAX, 1 << 29).unwrap();
    let (a, b) = (pages.create(), pages.create());
    pages.append(&[(a, 1 << 29), (b, 7)], &mut Vec::new()).unwrap();
    let before = pages.clone();
    for count in [1, u32::MAX] {
        let error = pages.append(&[(b, 1), (a, count)], &mut Vec::new()).unwrap_err();
        assert!(matches!(error, Error::Limit { limit: 0x2000_0000, .. }), "{error}");
        assert_eq!(pages, before);
    }
    assert_eq!(pages.available(), u32::MAX - 2);
    let mut short = Pages::new(u32::MAX, 1).unwrap();
    let ids: Vec<_> = (0..9).map(|_| short.create()).collect();
    let batch: Vec<_> = ids.iter().map(|id| (*id, 1 << 29)).collect();
    match short.append(&batch, &mut Vec::new()) {
        Err(Error::OutOfPages { needed: u32::MAX, free: u32::MAX }) => {}
        other => panic!("{other:?}"),
    }
}

/// Times of a server's step: `cargo test --release --test pages -- --ignored --nocapture`.
#[test]
#[ignore = "prints times"]
fn times() {
    let mut pages = Pages::new(20_000, 16).unwrap();
    let ids: Vec<_> = (0..256).map(|_| pages.create()).collect();
    let mut copies = Vec::new();
    let start: Vec<_> = ids.iter().map(|id| (*id, 32 * 16 - 8)).collect();
    pages.append(&start, &mut copies).unwrap();
    let one: Vec<_> = ids.iter().map(|id| (*id, 1)).collect();
    let mut buffer = TableBuffer::default();
    let (mut append, mut table) = (Vec::new(), Vec::new());
    for _ in 0..1000 {
        let clock = std::time::Instant::now();
        pages.append(&one, &mut copies).unwrap();
        append.push(clock.elapsed());
        let clock = std::time::Instant::now();
        std::hint::black_box(pages.table(&ids, &mut buffer).unwrap());
        table.push(clock.elapsed());
        if append.len() % 16 == 0 {
            ids.iter().for_each(|id| pages.truncate(*id, 32 * 16 - 8).unwrap());
        }
    }
    for (what, times) in [("append", &mut append), ("table", &mut table)] {
        times.sort();
        println!("{what} of 256 sequences × 32 to 33 pages: median {:?}, p99 {:?}", times[500], times[990]);
    }
    let clock = std::time::Instant::now();
    let stats = pages.stats();
    println!("stats: {:?}, {stats:?}", clock.elapsed());
}
