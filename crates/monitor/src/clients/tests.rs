use super::*;

#[test]
fn only_with_the_secret_and_the_same_rights_is_it_one_of_the_family() {
    let mut all = Clients::new(Rc::new(epoll::create(epoll::CreateFlags::CLOEXEC).unwrap()), 0);
    let mut add = |uid, class, family, secret| {
        let fd = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap();
        let client = Client { greeted: true, class, secret, ..Client::new(fd, uid, 0, family) };
        all.add(client).unwrap()
    };
    let _parent = add(7, 1, 70, 0xabcd);
    let _silent = add(7, 1, 71, 0);
    let those = [(7, 1, 0xabcd, 70), (7, 1, 0xabce, 80), (7, 1, 0, 80), (7, 2, 0xabcd, 80), (8, 1, 0xabcd, 80)];
    let those = those.map(|(uid, class, says, then)| (add(uid, class, 80, 0), says, then));
    for (id, says, then) in those {
        all.join_family(id, says);
        assert_eq!(all.get(id).unwrap().family, then, "{says:x}");
    }
    // Nor one that has something already.
    let fd = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap();
    let held = BTreeSet::from([5]);
    let id = all.add(Client { greeted: true, class: 1, holds: held, ..Client::new(fd, 7, 0, 80) }).unwrap();
    all.join_family(id, 0xabcd);
    assert_eq!(all.get(id).unwrap().family, 80);
}
