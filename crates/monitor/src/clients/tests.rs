use super::*;
use crate::foreign::ForeignFd;
use crate::leased::Leases;

#[test]
fn only_with_the_secret_and_the_same_rights_is_it_one_of_the_family() {
    let mut all = Clients::new(Rc::new(epoll::create(epoll::CreateFlags::CLOEXEC).unwrap()), 0);
    let mut add = |uid, (class, kernel), family, secret| {
        let fd = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap();
        let client =
            Client { greeted: true, class, kernel, secret, ..Client::new(ForeignFd::new(fd, uid), uid, 0, family) };
        all.add(client).unwrap()
    };
    let _parent = add(7, (1, 5), 70, 0xabcd);
    let _silent = add(7, (1, 5), 71, 0);
    let those = [
        (7, (1, 5), 0xabcd, 70),
        (7, (1, 5), 0xabce, 80),
        (7, (1, 5), 0, 80),
        (7, (2, 5), 0xabcd, 80),
        (7, (1, 6), 0xabcd, 80),
        (8, (1, 5), 0xabcd, 80),
    ];
    let those = those.map(|(uid, rights, says, then)| (add(uid, rights, 80, 0), says, then));
    for (id, says, then) in those {
        all.join_family(id, says);
        assert_eq!(all.get(id).unwrap().family, then, "{says:x}");
    }
    // Nor one that has something already.
    let mut leased = Leases::default();
    leased.add(1, 64);
    for (holds, leases) in [(BTreeSet::from([5]), Leases::default()), (BTreeSet::new(), leased)] {
        let fd = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap();
        let has = Client {
            greeted: true,
            class: 1,
            kernel: 5,
            holds,
            leases,
            ..Client::new(ForeignFd::new(fd, 7), 7, 0, 80)
        };
        let id = all.add(has).unwrap();
        all.join_family(id, 0xabcd);
        assert_eq!(all.get(id).unwrap().family, 80);
    }
}
