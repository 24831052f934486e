/* Finds out which two sockets of this host are the ends of one connection, whatever lies between
 * them: a bridge, another network namespace, translated addresses. The kernel reports each end
 * when its handshake is complete.
 *
 * Both ends know both initial sequence numbers, and address translation does not change these.
 * The two numbers identify a connection, but do not prove anything: a process with CAP_NET_ADMIN
 * in its network namespace can choose its number (TCP_REPAIR). So an end counts only under these
 * conditions:
 *
 * - It has done a handshake. (A socket in repair mode becomes established without a packet.)
 * - Its network namespace belongs to the same user namespace as that of the other end.
 * - The active end was reported first, because the passive end completes with a packet of the
 *   active end.
 * - No other socket has shown the same two numbers. Otherwise neither of the two counts.
 *
 * The numbers themselves stay in this program: user space sees only cookies of sockets.
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
/* A bit of skc_flags: the peer has closed. */
#define SOCK_DONE 1

/* Number of handshakes that are kept, whether the other end was seen or not. An entry must
 * survive as many new handshakes as can begin between the reports of its two ends. */
#define HANDSHAKES 32768
/* Number of ends that are kept for questions. The oldest are forgotten first. */
#define PEERS 131072

/* Initial sequence numbers. */
struct numbers {
	__u32 active;
	__u32 passive;
};

struct handshake {
	/* Cookies of the two sockets. `passive` is 0 until the passive end was reported. */
	__u64 active;
	__u64 passive;
	/* Address of the user namespace that owns the network namespace. */
	__u64 owner;
	/* Another socket has shown the same numbers. */
	__u32 poisoned;
	__u32 pad;
};

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, HANDSHAKES);
	__type(key, struct numbers);
	__type(value, struct handshake);
} handshakes SEC(".maps");

/* Cookie of a socket, to the cookie of the socket at the other end. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, PEERS);
	__type(key, __u64);
	__type(value, __u64);
} peers SEC(".maps");

/* Sockets whose end must be reported to the monitor. The entry is stored at the socket, and
 * freed with it. So for a socket that is not watched, the check is one look at a pointer. */
struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, __u64);
} watched SEC(".maps");

/* Cookies of watched sockets that the kernel has ended: because of unanswered keep-alive probes,
 * a reset, or `ss -K`. An entry has 16 bytes. There is room for all pairs, because all of them
 * may end at once. */
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, PEERS * 16);
} ended SEC(".maps");

enum reason {
	/* Both ends were reported. */
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
	/* Another socket with the same numbers may have come in between. */
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
	/* (The output fails while another CPU holds the buffer for too long. Then the other program
	 * reports the end.) */
	if (!bpf_ringbuf_output(&ended, &cookie, sizeof(cookie), 0))
		bpf_sk_storage_delete(&watched, sk);
}

SEC("tp_btf/inet_sock_set_state")
int BPF_PROG(changes, struct sock *sk, int old, int new)
{
	/* Only these three changes of a socket's state matter. (A socket that a program closes
	 * goes to FIN_WAIT1 or CLOSE_WAIT first.) */
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

/* The kernel does not run a BPF program on a CPU that is running it already. So `changes` misses
 * a change that an interrupt makes while `changes` handles another one. A missed handshake stays
 * unpaired, and its connection stays in the kernel. But an end must not be missed. An end is
 * also an error of the socket, so this rarer tracepoint reports it as well. */
SEC("tp_btf/inet_sk_error_report")
int BPF_PROG(errors, struct sock *sk)
{
	bool closed = sk->__sk_common.skc_state == TCP_CLOSE;

	if (closed && sk->sk_protocol == IPPROTO_TCP && !(sk->__sk_common.skc_flags & 1UL << SOCK_DONE))
		ended_by_the_kernel(sk);
	return 0;
}
