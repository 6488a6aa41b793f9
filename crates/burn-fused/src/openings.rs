//! Connections to a listener whose clients have not shown the token yet.
//!
//! Strangers can open any number of them. A listener keeps a limited number, and closes the one
//! that has advanced least for its age to take another. A client with the token needs a few
//! milliseconds and stays, while idle, slow and repeated connections go.

use std::collections::{HashMap, VecDeque};
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The openings that each address may have while others have more. Beyond it, the address with the
/// most loses one, so that it cannot close the connections of others.
const SHARE: usize = 8;
/// The weight of an opening's age by the steps that it has taken.
const WEIGHTS: [u128; 3] = [16, 4, 1];

struct Opening<T> {
    id: u64,
    origin: IpAddr,
    since: Instant,
    steps: usize,
    handle: T,
}

/// Connections being opened, each with a handle that closes it.
pub struct Openings<T> {
    limit: usize,
    list: Arc<Mutex<List<T>>>,
}

impl<T> Clone for Openings<T> {
    fn clone(&self) -> Self {
        let (limit, list) = (self.limit, self.list.clone());
        Self { limit, list }
    }
}

/// Oldest first, with the number of each origin.
struct List<T> {
    last: u64,
    openings: VecDeque<Opening<T>>,
    counts: HashMap<IpAddr, usize>,
}

impl<T> List<T> {
    fn remove(&mut self, index: usize) -> Option<T> {
        let opening = self.openings.remove(index)?;
        if let Some(count) = self.counts.get_mut(&opening.origin) {
            *count -= 1;
            if *count == 0 {
                self.counts.remove(&opening.origin);
            }
        }
        Some(opening.handle)
    }

    fn index(&self, id: u64) -> Option<usize> {
        self.openings.binary_search_by_key(&id, |x| x.id).ok()
    }

    /// The opening that makes room for another.
    fn least(&self, now: Instant) -> Option<usize> {
        let most = self.counts.values().copied().max()?;
        let may_go = |x: &Opening<T>| most <= SHARE || self.counts.get(&x.origin) == Some(&most);
        let lag = |x: &Opening<T>| {
            let age = now.saturating_duration_since(x.since).as_nanos();
            age * WEIGHTS[x.steps.min(WEIGHTS.len() - 1)]
        };
        let openings = self.openings.iter().enumerate();
        // Of equals the oldest.
        let openings = openings.filter(|(_, x)| may_go(x)).rev();
        openings.max_by_key(|(_, x)| lag(x)).map(|(index, _)| index)
    }
}

impl<T> Openings<T> {
    /// At most `limit` connections.
    pub fn new(limit: usize) -> Self {
        let list = List {
            last: 0,
            openings: VecDeque::new(),
            counts: HashMap::new(),
        };
        Self {
            limit: limit.max(1),
            list: Arc::new(Mutex::new(list)),
        }
    }

    fn lock(&self) -> MutexGuard<'_, List<T>> {
        // `start` is the only foreign code under the lock, and runs before any change that it could
        // leave half done.
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds the connection of a client, which `start` serves under the given number. Returns the
    /// handle of the connection to close for it, if there are too many.
    pub fn add(&self, client: SocketAddr, start: impl FnOnce(u64) -> T) -> Option<T> {
        let origin = origin(client);
        let now = Instant::now();
        let mut list = self.lock();
        let evicted = (list.openings.len() >= self.limit)
            .then(|| list.least(now))
            .flatten()
            .and_then(|index| list.remove(index));
        list.last += 1;
        let id = list.last;
        let handle = start(id);
        list.openings.push_back(Opening {
            id,
            origin,
            since: now,
            steps: 0,
            handle,
        });
        *list.counts.entry(origin).or_default() += 1;
        evicted
    }

    /// Notes that a connection has sent a valid part of its opening.
    pub fn advance(&self, id: u64) {
        let mut list = self.lock();
        if let Some(index) = list.index(id) {
            list.openings[index].steps += 1;
        }
    }

    /// Removes a connection that is open or has ended; false if it was closed to make room.
    pub fn finish(&self, id: u64) -> bool {
        let mut list = self.lock();
        let index = list.index(id);
        index.and_then(|index| list.remove(index)).is_some()
    }

    /// Removes the connections that have been opening for longer than `limit`, for the caller to
    /// close.
    pub fn expire(&self, limit: Duration) -> Vec<T> {
        let mut list = self.lock();
        let is_late = |x: &Opening<T>| x.since.elapsed() >= limit;
        let late = list.openings.iter().take_while(|x| is_late(x)).count();
        (0..late).filter_map(|_| list.remove(0)).collect()
    }
}

/// The origin of a connection: an IPv4 address, or an IPv6 network, since one host may have any
/// number of addresses in it.
fn origin(client: SocketAddr) -> IpAddr {
    match client.ip().to_canonical() {
        IpAddr::V6(ip) => IpAddr::V6(Ipv6Addr::from(u128::from(ip) >> 64 << 64)),
        ip => ip,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: usize = 64;

    fn client(address: &str) -> SocketAddr {
        SocketAddr::new(address.parse().expect("an address"), 1)
    }

    /// The numbers of the openings that are left.
    fn left(openings: &Openings<u64>) -> Vec<u64> {
        openings.lock().openings.iter().map(|x| x.id).collect()
    }

    /// Makes all openings older.
    fn wait(openings: &Openings<u64>, time: Duration) {
        for opening in &mut openings.lock().openings {
            opening.since -= time;
        }
    }

    #[test]
    fn the_address_with_the_most_openings_makes_room_and_those_of_others_stay() {
        let openings = Openings::new(LIMIT);
        let add = |address: &str| openings.add(client(address), |id| id);
        for _ in 0..SHARE {
            assert_eq!(add("10.0.0.1"), None);
        }
        for number in SHARE..10 * LIMIT {
            let addresses = ["10.0.0.2".to_owned(), "::ffff:10.0.0.2".to_owned()];
            let evicted = add(&addresses[number % 2]);
            let full = (number >= LIMIT).then(|| (SHARE + 1 + number - LIMIT) as u64);
            assert_eq!(evicted, full);
        }
        assert!((1..=SHARE as u64).all(|id| left(&openings).contains(&id)));
        // A network of IPv6 is one origin: it takes the places of the other crowd, then its own.
        for host in 0..10 * LIMIT {
            add(&format!("2001:db8::{host:x}"));
        }
        let of_first = left(&openings)
            .iter()
            .filter(|id| **id <= SHARE as u64)
            .count();
        assert_eq!((of_first, left(&openings).len()), (SHARE, LIMIT));
        let counts = openings.lock().counts.clone();
        // Both crowds have as many, but for one that the last took.
        let half = (LIMIT - SHARE) / 2;
        let of_crowd = counts[&"10.0.0.2".parse::<IpAddr>().expect("an address")];
        assert!([half - 1, half].contains(&of_crowd), "{of_crowd}");
        assert_eq!(counts.values().sum::<usize>(), LIMIT);
    }

    #[test]
    fn the_least_advanced_for_its_age_makes_room() {
        for address in [|_| "10.0.0.1".to_owned(), |id: u64| format!("10.0.1.{id}")] {
            let openings = Openings::new(LIMIT);
            let add = |id| openings.add(client(&address(id)), |id| id);
            // The first two are honest, and have sent something; the second all it has to.
            for id in 1..=LIMIT as u64 {
                add(id);
            }
            openings.advance(1);
            openings.advance(2);
            openings.advance(2);
            // Longer than the additions below take on a slow machine, which age meanwhile.
            wait(&openings, Duration::from_secs(100));
            for id in 0..LIMIT as u64 - 2 {
                assert_eq!(add(id), Some(id + 3));
            }
            // Those of now are younger: the first has had its time.
            assert_eq!(add(1), Some(1));
            wait(&openings, Duration::from_secs(100));
            assert_eq!(add(1), Some(LIMIT as u64 + 1));
            assert!(openings.finish(2) && !openings.finish(2) && !openings.finish(1));
        }
    }

    #[test]
    fn late_openings_expire() {
        let openings = Openings::new(LIMIT);
        openings.add(client("10.0.0.1"), |id| id);
        openings.add(client("10.0.0.2"), |id| id);
        wait(&openings, Duration::from_secs(10));
        openings.add(client("10.0.0.1"), |id| id);
        assert_eq!(openings.expire(Duration::from_secs(10)), [1, 2]);
        assert_eq!(left(&openings), [3]);
        assert!(!openings.finish(1));
        assert_eq!(openings.lock().counts.len(), 1);
    }
}
