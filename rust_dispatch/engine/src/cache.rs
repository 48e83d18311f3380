//! The prefix cache and the pages of the KV pool.
//!
//! A tree over token ids with one page a node: a path from the root spells a prefix in whole
//! pages. A request holds the path it matched, and a held page is not evicted. What nobody holds
//! stays until pages are needed, and goes least recently used first, leaves before their parents.
//!
//! Only whole prompt pages enter the tree: prompts of a trace are synthesised, so what a request
//! generated never occurs in a later prompt.

use std::collections::{BTreeSet, HashMap};

type NodeIdx = u32;

#[derive(Debug)]
struct Node {
    page: i32,
    /// `None` under the root.
    parent: Option<NodeIdx>,
    /// The page's tokens, which its parent finds it by.
    tokens: Box<[i32]>,
    children: HashMap<Box<[i32]>, NodeIdx>,
    /// Requests that hold a path through this node; never more than its parent has.
    holders: u32,
    /// Ticks of the cache's own counter; unique among nodes.
    used_at: u64,
}

/// The path that a request holds; give it back with [`PrefixCache::release`].
#[derive(Debug, Default, PartialEq, Eq)]
#[must_use]
pub struct Held {
    last: Option<NodeIdx>,
}

/// Pages of one KV pool, some of them in the tree.
#[derive(Debug)]
pub struct PrefixCache {
    page_size: usize,
    num_pages: usize,
    enabled: bool,
    free: Vec<i32>,
    nodes: Vec<Option<Node>>,
    vacant: Vec<NodeIdx>,
    roots: HashMap<Box<[i32]>, NodeIdx>,
    /// Leaves that nobody holds, least recently used first.
    evictable: BTreeSet<(u64, NodeIdx)>,
    /// Nodes that nobody holds, leaves or not: all of them can be evicted in turn.
    num_unheld: usize,
    tick: u64,
    num_evicted: u64,
}

impl PrefixCache {
    /// A pool of `num_pages` free pages of `page_size` tokens. `enabled` off: pages only, nothing
    /// is ever found.
    #[must_use]
    pub fn new(num_pages: usize, page_size: usize, enabled: bool) -> Self {
        assert!(0 < page_size, "a page holds tokens");
        Self {
            page_size,
            num_pages,
            enabled,
            // Taken from the back: low pages first.
            free: (0..num_pages as i32).rev().collect(),
            nodes: Vec::new(),
            vacant: Vec::new(),
            roots: HashMap::new(),
            evictable: BTreeSet::new(),
            num_unheld: 0,
            tick: 0,
            num_evicted: 0,
        }
    }

    /// Pages that [`Self::allocate`] can give now, by evicting what nobody holds.
    #[must_use]
    pub fn num_available(&self) -> usize {
        self.free.len() + self.num_unheld
    }

    /// Pages in the tree.
    #[must_use]
    pub fn num_cached(&self) -> usize {
        self.nodes.len() - self.vacant.len()
    }

    /// Pages of the pool.
    #[must_use]
    pub fn num_pages(&self) -> usize {
        self.num_pages
    }

    /// Pages evicted so far.
    #[must_use]
    pub fn num_evicted(&self) -> u64 {
        self.num_evicted
    }

    /// Finds the longest cached prefix of `prompt` in whole pages, at least one token short of all
    /// of it (a token must be left to run), holds it and appends its pages to `out_pages`.
    pub fn hold(&mut self, prompt: &[i32], out_pages: &mut Vec<i32>) -> Held {
        let mut last = None;
        if self.enabled {
            let whole_pages = prompt.len().saturating_sub(1) / self.page_size;
            for tokens in prompt.chunks_exact(self.page_size).take(whole_pages) {
                let Some(child) = self.child(last, tokens) else {
                    break;
                };
                out_pages.push(self.node(child).page);
                last = Some(child);
            }
        }
        self.add_holder(last);
        Held { last }
    }

    /// Ends a request's hold; its pages stay in the tree until they are evicted.
    pub fn release(&mut self, held: Held) {
        let mut next = held.last;
        while let Some(node_idx) = next {
            self.touch(node_idx);
            let node = self.node_mut(node_idx);
            node.holders -= 1;
            let (unheld, is_leaf, used_at) =
                (node.holders == 0, node.children.is_empty(), node.used_at);
            next = node.parent;
            if unheld {
                self.num_unheld += 1;
                if is_leaf {
                    self.evictable.insert((used_at, node_idx));
                }
            }
        }
    }

    /// Takes `count` pages, evicting as many as that needs. `None`, and nothing evicted, when
    /// even that is not enough.
    #[must_use]
    pub fn allocate(&mut self, count: usize) -> Option<Vec<i32>> {
        if self.num_available() < count {
            return None;
        }
        while self.free.len() < count {
            self.evict();
        }
        Some(self.free.split_off(self.free.len() - count))
    }

    /// Gives back pages that are not in the tree.
    pub fn free(&mut self, pages: &[i32]) {
        self.free.extend_from_slice(pages);
        debug_assert!(
            self.free.len() + self.num_cached() <= self.num_pages,
            "freed twice"
        );
    }

    /// Puts the whole pages of `prompt`, which have been computed, into the tree and moves the
    /// hold to the last of them. `pages` are the request's pages in order; where another request
    /// was faster with the same tokens, its page takes the place and ours is freed. Returns how
    /// many of `pages` now belong to the tree: the first ones.
    pub fn insert(&mut self, prompt: &[i32], pages: &mut [i32], held: Held) -> (Held, usize) {
        if !self.enabled {
            return (held, 0);
        }
        let mut last = None;
        let mut num_whole = 0;
        for (tokens, page) in prompt.chunks_exact(self.page_size).zip(pages.iter_mut()) {
            num_whole += 1;
            let node_idx = match self.child(last, tokens) {
                Some(node_idx) => {
                    let cached = self.node(node_idx).page;
                    // A held page is the cached one, so what is freed here was the request's own.
                    if cached != *page {
                        self.free.push(*page);
                        *page = cached;
                    }
                    node_idx
                }
                None => self.add_node(last, tokens, *page),
            };
            last = Some(node_idx);
        }
        // The new hold first: between the two nothing is up for eviction.
        self.add_holder(last);
        self.release(held);
        (Held { last }, num_whole)
    }

    fn node(&self, node_idx: NodeIdx) -> &Node {
        self.nodes[node_idx as usize]
            .as_ref()
            .expect("a linked node is there")
    }

    fn node_mut(&mut self, node_idx: NodeIdx) -> &mut Node {
        self.nodes[node_idx as usize]
            .as_mut()
            .expect("a linked node is there")
    }

    fn child(&self, parent: Option<NodeIdx>, tokens: &[i32]) -> Option<NodeIdx> {
        let children = match parent {
            Some(parent) => &self.node(parent).children,
            None => &self.roots,
        };
        children.get(tokens).copied()
    }

    /// Adds a node, which the caller holds before anything can be evicted.
    fn add_node(&mut self, parent: Option<NodeIdx>, tokens: &[i32], page: i32) -> NodeIdx {
        self.tick += 1;
        let node = Node {
            page,
            parent,
            tokens: tokens.into(),
            children: HashMap::new(),
            holders: 0,
            used_at: self.tick,
        };
        let node_idx = match self.vacant.pop() {
            Some(node_idx) => {
                self.nodes[node_idx as usize] = Some(node);
                node_idx
            }
            None => {
                self.nodes.push(Some(node));
                (self.nodes.len() - 1) as NodeIdx
            }
        };
        match parent {
            Some(parent) => {
                self.node_mut(parent)
                    .children
                    .insert(tokens.into(), node_idx);
            }
            None => {
                self.roots.insert(tokens.into(), node_idx);
            }
        }
        self.num_unheld += 1;
        node_idx
    }

    /// Adds a holder to the path that ends at `last`.
    fn add_holder(&mut self, last: Option<NodeIdx>) {
        let mut next = last;
        while let Some(node_idx) = next {
            let node = self.node_mut(node_idx);
            node.holders += 1;
            let (first_holder, key) = (node.holders == 1, (node.used_at, node_idx));
            next = node.parent;
            if first_holder {
                self.num_unheld -= 1;
                self.evictable.remove(&key);
            }
        }
    }

    /// Marks a held node as just used. A parent is touched after its children, so it is always
    /// the more recent one.
    fn touch(&mut self, node_idx: NodeIdx) {
        self.tick += 1;
        let tick = self.tick;
        self.node_mut(node_idx).used_at = tick;
    }

    fn evict(&mut self) {
        let (_, node_idx) = self
            .evictable
            .pop_first()
            .expect("an unheld tree has an unheld leaf");
        let node = self.nodes[node_idx as usize]
            .take()
            .expect("a linked node is there");
        self.vacant.push(node_idx);
        self.num_unheld -= 1;
        self.num_evicted += 1;
        self.free.push(node.page);
        match node.parent {
            Some(parent) => {
                let parent_node = self.node_mut(parent);
                parent_node.children.remove(&node.tokens);
                if parent_node.children.is_empty() && parent_node.holders == 0 {
                    let key = (parent_node.used_at, parent);
                    self.evictable.insert(key);
                }
            }
            None => {
                self.roots.remove(&node.tokens);
            }
        }
    }
}
