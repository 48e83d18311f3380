//! The prefix cache against a naive model: a flat list of prefixes that is searched from end to
//! end.

use std::collections::{BTreeMap, BTreeSet};

use lowlat_engine::cache::{Held, PrefixCache};
use proptest::prelude::*;

const PAGE: usize = 2;

/// Prefix (whole pages of tokens) → page, tick of last use, holders.
#[derive(Default)]
struct Naive {
    cached: BTreeMap<Vec<i32>, (i32, u64, u32)>,
    num_free: usize,
    tick: u64,
}

impl Naive {
    fn found(&self, prompt: &[i32], most: usize) -> Vec<i32> {
        let mut pages = Vec::new();
        for end in (PAGE..=most).step_by(PAGE) {
            let Some((page, _, _)) = self.cached.get(&prompt[..end]) else {
                break;
            };
            pages.push(*page);
        }
        pages
    }

    fn prefixes(prompt: &[i32], num_pages: usize) -> Vec<Vec<i32>> {
        (1..=num_pages)
            .map(|pages| prompt[..pages * PAGE].to_vec())
            .collect()
    }

    fn hold(&mut self, prompt: &[i32], num_pages: usize) {
        for prefix in Self::prefixes(prompt, num_pages) {
            self.cached.get_mut(&prefix).unwrap().2 += 1;
        }
    }

    /// Deepest first, so that a parent is always used later than its children.
    fn release(&mut self, prompt: &[i32], num_pages: usize) {
        for prefix in Self::prefixes(prompt, num_pages).into_iter().rev() {
            self.tick += 1;
            let entry = self.cached.get_mut(&prefix).unwrap();
            entry.1 = self.tick;
            entry.2 -= 1;
        }
    }

    fn num_available(&self) -> usize {
        self.num_free
            + self
                .cached
                .values()
                .filter(|(_, _, holders)| *holders == 0)
                .count()
    }

    fn allocate(&mut self, count: usize) {
        while self.num_free < count {
            let leaf = |prefix: &Vec<i32>| {
                !self
                    .cached
                    .keys()
                    .any(|other| other.len() > prefix.len() && other.starts_with(prefix))
            };
            let oldest = self
                .cached
                .iter()
                .filter(|(prefix, (_, _, holders))| *holders == 0 && leaf(prefix))
                .min_by_key(|(_, (_, used_at, _))| *used_at)
                .map(|(prefix, _)| prefix.clone())
                .unwrap();
            self.cached.remove(&oldest);
            self.num_free += 1;
        }
        self.num_free -= count;
    }

    /// Inserts whole prompt pages; returns the pages as they are afterwards.
    fn insert(&mut self, prompt: &[i32], pages: &[i32]) -> Vec<i32> {
        let mut after = pages.to_vec();
        for (idx, prefix) in Self::prefixes(prompt, prompt.len() / PAGE)
            .into_iter()
            .enumerate()
        {
            match self.cached.get(&prefix) {
                Some((page, _, _)) => {
                    self.num_free += usize::from(*page != pages[idx]);
                    after[idx] = *page;
                }
                None => {
                    self.tick += 1;
                    self.cached.insert(prefix, (pages[idx], self.tick, 0));
                }
            }
        }
        after
    }
}

/// A request in flight.
struct Request {
    prompt: Vec<i32>,
    held: Held,
    num_held: usize,
    pages: Vec<i32>,
    num_shared: usize,
    inserted: bool,
}

#[derive(Clone, Debug)]
enum Op {
    /// Prompt, pages beyond the prompt's own.
    Admit(Vec<i32>, usize),
    Insert(usize),
    End(usize),
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        4 => (prop::collection::vec(0..2i32, 1..9), 0..3usize).prop_map(|(p, n)| Op::Admit(p, n)),
        3 => (0..8usize).prop_map(Op::Insert),
        3 => (0..8usize).prop_map(Op::End),
    ]
}

fn check_pages(cache: &PrefixCache, naive: &Naive, running: &[Request]) {
    assert_eq!(cache.num_available(), naive.num_available());
    assert_eq!(cache.num_cached(), naive.cached.len());
    let mut owned: Vec<i32> = naive.cached.values().map(|(page, _, _)| *page).collect();
    for request in running {
        owned.extend(&request.pages[request.num_shared..]);
    }
    let distinct: BTreeSet<i32> = owned.iter().copied().collect();
    assert_eq!(distinct.len(), owned.len(), "no page has two owners");
    assert_eq!(
        owned.len() + naive.num_free,
        cache.num_pages(),
        "no page is lost"
    );
}

fn run(ops: &[Op], num_pages: usize) {
    let mut cache = PrefixCache::new(num_pages, PAGE, true);
    let mut naive = Naive {
        num_free: num_pages,
        ..Naive::default()
    };
    let mut running: Vec<Request> = Vec::new();
    for op in ops {
        match op {
            Op::Admit(prompt, extra) => {
                let mut pages = Vec::new();
                let held = cache.hold(prompt, &mut pages);
                let found = naive.found(prompt, prompt.len() - 1);
                assert_eq!(pages, found);
                assert!(pages.len() * PAGE < prompt.len(), "a token is left to run");
                naive.hold(prompt, found.len());
                let num_held = pages.len();
                let wanted = prompt.len().div_ceil(PAGE) + extra - num_held;
                let fits = wanted <= naive.num_available();
                match cache.allocate(wanted) {
                    Some(own) => {
                        assert!(fits);
                        naive.allocate(wanted);
                        pages.extend(own);
                        running.push(Request {
                            prompt: prompt.clone(),
                            held,
                            num_held,
                            pages,
                            num_shared: num_held,
                            inserted: false,
                        });
                    }
                    None => {
                        assert!(!fits);
                        cache.release(held);
                        naive.release(prompt, num_held);
                    }
                }
            }
            Op::Insert(idx) => {
                let Some(request) = running.get_mut(*idx).filter(|request| !request.inserted)
                else {
                    continue;
                };
                let after = naive.insert(&request.prompt, &request.pages);
                let held = std::mem::take(&mut request.held);
                let (held, num_shared) = cache.insert(&request.prompt, &mut request.pages, held);
                assert_eq!(request.pages, after);
                assert_eq!(num_shared, request.prompt.len() / PAGE);
                naive.hold(&request.prompt, num_shared);
                naive.release(&request.prompt, request.num_held);
                request.held = held;
                request.num_held = num_shared;
                request.num_shared = num_shared;
                request.inserted = true;
            }
            Op::End(idx) => {
                if *idx >= running.len() {
                    continue;
                }
                let request = running.remove(*idx);
                cache.release(request.held);
                naive.release(&request.prompt, request.num_held);
                cache.free(&request.pages[request.num_shared..]);
                naive.num_free += request.pages.len() - request.num_shared;
            }
        }
        check_pages(&cache, &naive, &running);
    }
}

proptest! {
    // Mutations seen to fail: no `touch` in release; add_holder without removing the node from
    // the evictable ones; evict that leaves the parent out; insert that keeps a duplicate page.
    #[test]
    fn does_what_a_flat_list_does(
        ops in prop::collection::vec(op(), 1..60),
        num_pages in 4..14usize,
    ) {
        run(&ops, num_pages);
    }
}

/// Inserts a prompt and ends its request.
fn store(cache: &mut PrefixCache, prompt: &[i32]) {
    let mut pages = Vec::new();
    let held = cache.hold(prompt, &mut pages);
    let num_held = pages.len();
    pages.extend(
        cache
            .allocate(prompt.len().div_ceil(PAGE) - num_held)
            .unwrap(),
    );
    let (held, num_shared) = cache.insert(prompt, &mut pages, held);
    cache.release(held);
    cache.free(&pages[num_shared..]);
}

fn found(cache: &mut PrefixCache, prompt: &[i32]) -> usize {
    let mut pages = Vec::new();
    let held = cache.hold(prompt, &mut pages);
    cache.release(held);
    pages.len() * PAGE
}

#[test]
fn a_prompt_that_is_all_cached_leaves_a_token_to_run() {
    let mut cache = PrefixCache::new(8, PAGE, true);
    store(&mut cache, &[1, 2, 3, 4]);
    assert_eq!(found(&mut cache, &[1, 2, 3, 4]), 2);
    assert_eq!(found(&mut cache, &[1, 2, 3, 4, 5]), 4);
    assert_eq!(found(&mut cache, &[1]), 0);
}

#[test]
fn what_was_used_last_stays_longest() {
    let mut cache = PrefixCache::new(4, PAGE, true);
    store(&mut cache, &[1, 1, 1, 1]);
    store(&mut cache, &[2, 2]);
    assert_eq!(found(&mut cache, &[1, 1, 9]), 2);
    let pages = cache.allocate(3).unwrap();
    assert_eq!(cache.num_evicted(), 2);
    assert_eq!(found(&mut cache, &[2, 2, 9]), 0);
    assert_eq!(
        found(&mut cache, &[1, 1, 1, 1, 9]),
        2,
        "the leaf went before its parent"
    );
    assert_eq!(cache.allocate(2), None);
    assert_eq!(
        cache.num_evicted(),
        2,
        "what cannot be given evicts nothing"
    );
    cache.free(&pages);
}

#[test]
fn switched_off_finds_and_keeps_nothing() {
    let mut cache = PrefixCache::new(4, PAGE, false);
    store(&mut cache, &[1, 1, 1, 1]);
    assert_eq!(found(&mut cache, &[1, 1, 1, 1, 1]), 0);
    assert_eq!((cache.num_cached(), cache.num_available()), (0, 4));
}
