/* Which two sockets are the ends of one connection, whatever lies between them on this host:
 * a bridge, another network namespace, translated addresses. Each end's view is the kernel's own,
 * taken when its handshake ends.
 *
 * Both ends know both initial sequence numbers, and no kind of address translation changes
 * them. That identifies a connection, and is no proof: with CAP_NET_ADMIN in its network namespace a
 * process can choose its number (TCP_REPAIR). So an end counts only if
 *   - it has shaken hands (a socket in repair mode becomes established without a packet),
 *   - its network namespace belongs to the same user namespace as the other end's,
 *   - the active end came first, as the passive one answers to its last packet,
 *   - nobody else has shown the same two numbers: then neither of them counts.
 * The numbers themselves stay in here: user space sees cookies of sockets only.
 *
 * own = snd_una - bytes_acked (- 1 at the passive end, which does not count its SYN),
 * peer = rcv_nxt - bytes_received - 1: right at any time, also with fast open and SYN cookies.
 */
#include "vmlinux.h"
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>
#include "counters.h"

char LICENSE[] SEC("license") = "GPL";

#define AF_INET 2
#define AF_INET6 10
#define IPPROTO_TCP 6
/* In skc_flags: the peer has closed. */
#define SOCK_DONE 1

/* Handshakes whose other end is still to come, and those that are complete: as many as may begin
 * between the two. */
#define HANDSHAKES 32768
/* Ends of connections that can be asked about; the oldest are forgotten first. */
#define PEERS 131072

/* Initial sequence numbers. */
struct numbers {
	__u32 active;
	__u32 passive;
};

struct handshake {
	/* Cookies of the sockets; `passive` 0: not there yet. */
	__u64 active;
	__u64 passive;
	/* The user namespace that owns the network namespace, as an address. */
	__u64 owner;
	/* Somebody else has shown the same numbers. */
	__u32 poisoned;
	__u32 pad;
};

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, HANDSHAKES);
	__type(key, struct numbers);
	__type(value, struct handshake);
} handshakes SEC(".maps");

/* Cookie of a socket: cookie of the socket at the other end. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, PEERS);
	__type(key, __u64);
	__type(value, __u64);
} peers SEC(".maps");

/* Sockets whose end the monitor wants to hear of. It lies at the socket, and goes with it: a socket that is not
 * watched costs one look at a pointer. */
struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, __u64);
} watched SEC(".maps");

/* Cookies of watched sockets that the kernel has ended: no answer to keep-alive probes, a reset, `ss -K`.
 * 16 bytes each: as many as there are pairs may end at once, and nobody's end gets lost among those of others. */
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, PEERS * 16);
} ended SEC(".maps");

enum reason {
	/* Both ends seen. */
	PAIRED,
	/* A socket in repair mode. */
	REPAIRED,
	/* The two network namespaces belong to different user namespaces. */
	FOREIGN,
	/* A second end with the same numbers. */
	DUPLICATE,
	REASONS,
};
COUNTERS(reasons, REASONS);

static __always_inline bool stays_in_one_namespace(struct sock *sk)
{
	struct sock_common *common = &sk->__sk_common;

	if (common->skc_family == AF_INET)
		return (common->skc_daddr & bpf_htonl(0xff000000)) == bpf_htonl(0x7f000000) ||
		       common->skc_daddr == common->skc_rcv_saddr;
	for (int i = 0; i < 4; i++)
		if (common->skc_v6_daddr.in6_u.u6_addr32[i] != common->skc_v6_rcv_saddr.in6_u.u6_addr32[i])
			return false;
	return true;
}

static __always_inline void forget(struct handshake *seen)
{
	__u64 active = seen->active, passive = seen->passive;

	seen->poisoned = 1;
	COUNT(reasons, DUPLICATE);
	bpf_map_delete_elem(&peers, &active);
	if (passive)
		bpf_map_delete_elem(&peers, &passive);
}

static __always_inline void active_end(struct numbers *numbers, __u64 cookie, __u64 owner)
{
	struct handshake new = { .active = cookie, .owner = owner };
	struct handshake *seen;

	if (!bpf_map_update_elem(&handshakes, numbers, &new, BPF_NOEXIST))
		return;
	seen = bpf_map_lookup_elem(&handshakes, numbers);
	if (seen && seen->active != cookie)
		forget(seen);
}

static __always_inline void passive_end(struct numbers *numbers, __u64 cookie, __u64 owner)
{
	struct handshake *seen = bpf_map_lookup_elem(&handshakes, numbers);
	__u64 active;

	/* The other end is on another host. */
	if (!seen || seen->poisoned)
		return;
	if (seen->owner != owner) {
		COUNT(reasons, FOREIGN);
		return;
	}
	if (__sync_val_compare_and_swap(&seen->passive, 0, cookie)) {
		forget(seen);
		return;
	}
	active = seen->active;
	bpf_map_update_elem(&peers, &active, &cookie, BPF_ANY);
	bpf_map_update_elem(&peers, &cookie, &active, BPF_ANY);
	/* Somebody may have come in between. */
	if (seen->poisoned) {
		bpf_map_delete_elem(&peers, &active);
		bpf_map_delete_elem(&peers, &cookie);
		return;
	}
	COUNT(reasons, PAIRED);
}

static __always_inline void established(struct sock *sk, bool passive)
{
	struct tcp_sock *tp = bpf_skc_to_tcp_sock(sk);
	struct numbers numbers;
	__u32 own, peer;
	__u64 owner;

	if (!tp)
		return;
	if (BPF_CORE_READ_BITFIELD_PROBED(tp, repair)) {
		COUNT(reasons, REPAIRED);
		return;
	}
	own = tp->snd_una - (__u32)tp->bytes_acked - (passive ? 1 : 0);
	peer = tp->rcv_nxt - (__u32)tp->bytes_received - 1;
	owner = (__u64)sk->__sk_common.skc_net.net->user_ns;
	numbers.active = passive ? peer : own;
	numbers.passive = passive ? own : peer;
	if (passive)
		passive_end(&numbers, bpf_get_socket_cookie(sk), owner);
	else
		active_end(&numbers, bpf_get_socket_cookie(sk), owner);
}

static __always_inline void ended_by_the_kernel(struct sock *sk)
{
	__u64 cookie;

	if (!bpf_sk_storage_get(&watched, sk, 0, 0))
		return;
	cookie = bpf_get_socket_cookie(sk);
	bpf_ringbuf_output(&ended, &cookie, sizeof(cookie), 0);
	bpf_sk_storage_delete(&watched, sk);
}

SEC("tp_btf/inet_sock_set_state")
int BPF_PROG(changes, struct sock *sk, int old, int new)
{
	/* Of a socket's ten changes these three matter; a program that closes one leaves by FIN_WAIT1 or CLOSE_WAIT. */
	if (new == TCP_CLOSE) {
		if (old == TCP_ESTABLISHED && sk->sk_protocol == IPPROTO_TCP)
			ended_by_the_kernel(sk);
	} else if (new == TCP_ESTABLISHED && sk->sk_protocol == IPPROTO_TCP && !stays_in_one_namespace(sk)) {
		if (old == TCP_SYN_SENT)
			established(sk, false);
		else if (old == TCP_SYN_RECV)
			established(sk, true);
	}
	return 0;
}

/* The kernel does not run a program on a CPU on which it runs already. So `changes` does not see what an interrupt
 * changes while it looks at another change: a handshake then stays unpaired, and its connection in the kernel. An end
 * must not be missed. It is also an error of the socket, which few are told of. */
SEC("tp_btf/inet_sk_error_report")
int BPF_PROG(errors, struct sock *sk)
{
	bool closed = sk->__sk_common.skc_state == TCP_CLOSE;

	if (closed && sk->sk_protocol == IPPROTO_TCP && !(sk->__sk_common.skc_flags & 1UL << SOCK_DONE))
		ended_by_the_kernel(sk);
	return 0;
}
