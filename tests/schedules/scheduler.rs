//! A seeded scheduler of real threads: one goes at a time, and a seed decides which.
//!
//! Threads stop at *seams*: before each step of a runner, and at calls of the card (see `card.rs`). Work that
//! a stream is given may be held back too; then letting its next piece go is a choice like any other. A
//! choice is made only when every thread of the process sleeps: those at seams, and those that wait for a
//! lock, a signal or the card. So a thread that is stopped while it holds a lock stops nobody but those who
//! want that lock, and the order of events follows from the seed as far as the seams go: of two threads
//! that want a lock at once between seams, the system picks one.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use vram_pager::device::emulated::Hold;

/// A run in which nothing can go on for so long hangs.
const HANGS_AFTER: Duration = Duration::from_secs(20);

/// One round of splitmix64.
pub fn mix(value: u64) -> u64 {
    let mut x = value.wrapping_add(0x9E37_79B9_7F4A_7C15);
    x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}

/// What a run did.
#[derive(Clone, Debug, Default)]
pub struct Trace {
    /// Choices made.
    pub choices: u64,
    /// Choices between more than one way.
    pub real_choices: u64,
    /// What was chosen, all of it mixed into one number.
    pub hash: u64,
    /// The last choices, for a person.
    pub last: VecDeque<String>,
}

struct Actor {
    /// Where it is stopped.
    parked: Option<&'static str>,
    may_go: bool,
    seams: u64,
    goes: Arc<Condvar>,
}

#[derive(Default)]
struct State {
    on: bool,
    seed: u64,
    /// One seam in so many stops a thread.
    every: u64,
    /// By name, so that choices are in one order whichever thread came first.
    actors: BTreeMap<String, Actor>,
    names: HashMap<ThreadId, String>,
    driver: Option<ThreadId>,
    runners_left: usize,
    held: BTreeMap<u64, VecDeque<Hold>>,
    trace: Trace,
}

/// The scheduler of one run.
#[derive(Default)]
pub struct Scheduler {
    state: Mutex<State>,
}

impl Scheduler {
    /// A scheduler that stops nobody yet. The calling thread is the driver: it is never stopped.
    pub fn new(seed: u64) -> Arc<Self> {
        let driver = Some(std::thread::current().id());
        let state = State { seed: mix(seed), every: 1 + seed % 3, driver, ..State::default() };
        Arc::new(Self { state: Mutex::new(state) })
    }

    /// From here on threads stop at seams, until `runners` of them have ended.
    pub fn start(&self, runners: usize) {
        let mut state = self.state.lock();
        state.on = true;
        state.runners_left = runners;
    }

    /// A place where the calling thread may be stopped. As the seed says, every seam does, one in two or one
    /// in three; a runner's `step` always.
    pub fn seam(&self, at: &'static str) {
        let mut state = self.state.lock();
        let me = std::thread::current();
        if !state.on || state.driver == Some(me.id()) {
            return;
        }
        let name = match state.names.get(&me.id()) {
            Some(name) => name.clone(),
            None => {
                let name = me.name().unwrap_or("unnamed").to_owned();
                state.names.insert(me.id(), name.clone());
                let goes = Arc::new(Condvar::new());
                state.actors.insert(name.clone(), Actor { parked: None, may_go: false, seams: 0, goes });
                name
            }
        };
        let (seed, every) = (state.seed, state.every);
        let Some(actor) = state.actors.get_mut(&name) else { return };
        actor.seams += 1;
        let salt = name.bytes().fold(seed, |salt, byte| mix(salt ^ u64::from(byte)));
        if at != "step" && !mix(salt ^ actor.seams).is_multiple_of(every) {
            return;
        }
        actor.parked = Some(at);
        let goes = Arc::clone(&actor.goes);
        while state.on && !state.actors[&name].may_go {
            goes.wait(&mut state);
        }
        if let Some(actor) = state.actors.get_mut(&name) {
            actor.parked = None;
            actor.may_go = false;
        }
    }

    /// A runner has ended.
    pub fn ended(&self) {
        self.state.lock().runners_left -= 1;
    }

    /// Whether the next work of a stream should be held back.
    pub fn holds_back(&self) -> bool {
        let state = self.state.lock();
        let me = std::thread::current().id();
        let Some(actor) = state.names.get(&me).and_then(|name| state.actors.get(name)) else { return false };
        state.on && mix(state.seed ^ mix(actor.seams) ^ 0x401D).is_multiple_of(2)
    }

    /// A stream is held back until this is chosen.
    pub fn hold(&self, stream: u64, hold: Hold) {
        let mut state = self.state.lock();
        if state.on {
            state.held.entry(stream).or_default().push_back(hold);
        }
    }

    /// Chooses until all runners have ended; then everybody goes on freely.
    ///
    /// # Errors
    /// Nothing can go on: says where everybody is.
    pub fn drive(&self) -> Result<Trace, String> {
        let mut threads = Threads::default();
        let mut idle_since: Option<Instant> = None;
        let mut random = self.state.lock().seed;
        loop {
            threads.wait_until_all_sleep();
            let mut state = self.state.lock();
            if state.runners_left == 0 {
                break;
            }
            let stopped = state.actors.iter().filter(|(_, actor)| actor.parked.is_some() && !actor.may_go);
            let mut ways: Vec<Result<String, u64>> = stopped.map(|(name, _)| Ok(name.clone())).collect();
            ways.extend(state.held.keys().map(|stream| Err(*stream)));
            if ways.is_empty() {
                // Somebody waits with a deadline, or everybody hangs.
                let since = *idle_since.get_or_insert_with(Instant::now);
                if since.elapsed() > HANGS_AFTER {
                    let trace = state.trace.clone();
                    Self::let_go(state);
                    return Err(format!("hangs; the last choices: {:#?}", trace.last));
                }
                drop(state);
                std::thread::sleep(Duration::from_micros(200));
                continue;
            }
            idle_since = None;
            random = mix(random);
            let count = ways.len() as u64;
            let way = ways.swap_remove(usize::try_from(random % count).unwrap_or(0));
            let said = match &way {
                Ok(name) => format!("{name} goes on at {}", state.actors[name].parked.unwrap_or("?")),
                Err(stream) => format!("stream {stream} goes on"),
            };
            let trace = &mut state.trace;
            trace.choices += 1;
            trace.real_choices += u64::from(count > 1);
            trace.hash = said.bytes().fold(trace.hash, |hash, byte| mix(hash ^ u64::from(byte)));
            trace.last.push_back(said);
            if trace.last.len() > 60 {
                trace.last.pop_front();
            }
            match way {
                Ok(name) => {
                    if let Some(actor) = state.actors.get_mut(&name) {
                        actor.may_go = true;
                        actor.goes.notify_one();
                    }
                }
                Err(stream) => {
                    let held = state.held.get_mut(&stream).and_then(VecDeque::pop_front);
                    if state.held.get(&stream).is_some_and(VecDeque::is_empty) {
                        state.held.remove(&stream);
                    }
                    drop(state);
                    drop(held);
                }
            }
        }
        let state = self.state.lock();
        let trace = state.trace.clone();
        Self::let_go(state);
        Ok(trace)
    }

    /// Stops nobody any more.
    fn let_go(mut state: parking_lot::MutexGuard<'_, State>) {
        state.on = false;
        for actor in state.actors.values() {
            actor.goes.notify_one();
        }
        let held = std::mem::take(&mut state.held);
        drop(state);
        drop(held);
    }
}

/// The threads of this process, to see whether any of them runs.
#[derive(Default)]
struct Threads {
    stat: HashMap<u64, File>,
}

impl Threads {
    /// Waits until twice in a row every other thread sleeps.
    fn wait_until_all_sleep(&mut self) {
        let mut quiet = 0;
        let mut looks = 0_u32;
        while quiet < 2 {
            quiet = if self.all_sleep() { quiet + 1 } else { 0 };
            looks += 1;
            if looks > 20 {
                std::thread::sleep(Duration::from_micros(50));
            } else {
                std::thread::yield_now();
            }
        }
    }

    fn all_sleep(&mut self) -> bool {
        let own = std::fs::read_link("/proc/thread-self").ok();
        let own = own.and_then(|path| path.file_name()?.to_str()?.parse::<u64>().ok());
        let Ok(tasks) = std::fs::read_dir("/proc/self/task") else { return true };
        let ids: Vec<u64> = tasks.filter_map(|task| task.ok()?.file_name().to_str()?.parse().ok()).collect();
        self.stat.retain(|id, _| ids.contains(id));
        for id in ids {
            if Some(id) == own {
                continue;
            }
            if let Entry::Vacant(entry) = self.stat.entry(id) {
                let Ok(file) = File::open(format!("/proc/self/task/{id}/stat")) else { continue };
                entry.insert(file);
            }
            let mut text = [0; 256];
            let Some(Ok(length)) = self.stat.get(&id).map(|file| file.read_at(&mut text, 0)) else {
                continue;
            };
            // The state follows the name, which ends with the last bracket.
            let text = &text[..length];
            let state = text.iter().rposition(|&byte| byte == b')').and_then(|end| text.get(end + 2));
            if state.is_some_and(|&state| state != b'S' && state != b'Z' && state != b'X') {
                return false;
            }
        }
        true
    }
}
