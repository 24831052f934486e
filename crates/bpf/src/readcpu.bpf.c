/* Remembers the CPU on which the application uses each connection. steer.bpf.c sends the
 * connection's next packets there.
 *
 * There are two programs. One remembers where a connection was last read
 * (Receive-CPU-Selection). The other one remembers where it was opened (Receive Flow Deliver, if
 * the kernel cannot express this by the source port).
 *
 * An entry that outlives its connection does no harm: when the next connection with these
 * addresses is opened or first read, the entry is corrected; and the map forgets the least used
 * entries.
 */
#include "vmlinux.h"
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>
#include "flow.h"

char LICENSE[] SEC("license") = "GPL";

#define AF_INET 2
#define AF_INET6 10
#define IPPROTO_TCP 6

/* Only connections of this network namespace are remembered. */
const volatile __u64 netns = 0;

/* The map of the same name in steer.bpf.c. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 65536);
	__type(key, struct flow);
	__type(value, __u32);
} flows SEC(".maps");

/* 1 + the CPU on which the socket was opened. Stored at the socket, which has no port at that
 * moment. */
struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, __u32);
} openers SEC(".maps");

/* Loopback is skipped: steered devices have no such packets, and there may be many. */
static __always_inline bool is_loopback(const struct sock_common *common)
{
	const __be32 *to = common->skc_v6_daddr.in6_u.u6_addr32;

	if (common->skc_family == AF_INET)
		return (bpf_ntohl(common->skc_daddr) >> 24) == 127;
	if (to[0] || to[1])
		return false;
	return to[2] ? to[2] == bpf_htonl(0xffff) && (bpf_ntohl(to[3]) >> 24) == 127 : to[3] == bpf_htonl(1);
}

/* Stores that packets of this connection belong to CPU number `cpu` - 1. */
static __always_inline void remember(const struct sock *sk, __u32 cpu)
{
	const struct sock_common *common = &sk->__sk_common;
	struct flow flow = {};
	__u32 *seen;

	if (is_loopback(common))
		return;
	if (common->skc_family == AF_INET) {
		flow.local_ip[2] = flow.remote_ip[2] = bpf_htonl(0xffff);
		flow.local_ip[3] = common->skc_rcv_saddr;
		flow.remote_ip[3] = common->skc_daddr;
	} else if (common->skc_family == AF_INET6) {
		for (int i = 0; i < 4; i++) {
			flow.local_ip[i] = common->skc_v6_rcv_saddr.in6_u.u6_addr32[i];
			flow.remote_ip[i] = common->skc_v6_daddr.in6_u.u6_addr32[i];
		}
	} else {
		return;
	}
	flow.local_port = common->skc_num;
	flow.remote_port = bpf_ntohs(common->skc_dport);
	seen = bpf_map_lookup_elem(&flows, &flow);
	if (seen)
		*seen = cpu;
	else
		bpf_map_update_elem(&flows, &flow, &cpu, BPF_ANY);
}

SEC("tp_btf/tcp_rcv_space_adjust")
int BPF_PROG(reads, struct sock *sk)
{
	if (sk->__sk_common.skc_net.net->net_cookie == netns)
		remember(sk, bpf_get_smp_processor_id() + 1);
	return 0;
}

/* `connect` comes here twice: first without a port, on the application's CPU; then with a port,
 * on the CPU that has received the SYN-ACK. */
SEC("tp_btf/inet_sock_set_state")
int BPF_PROG(opens, struct sock *sk, int old, int new)
{
	__u32 *opener;

	/* Other protocols have these states, too. */
	if (sk->sk_protocol != IPPROTO_TCP || sk->__sk_common.skc_net.net->net_cookie != netns)
		return 0;
	if (new == TCP_SYN_SENT) {
		opener = bpf_sk_storage_get(&openers, sk, 0, BPF_SK_STORAGE_GET_F_CREATE);
		if (opener)
			*opener = bpf_get_smp_processor_id() + 1;
	} else if (new == TCP_ESTABLISHED && old == TCP_SYN_SENT) {
		opener = bpf_sk_storage_get(&openers, sk, 0, 0);
		if (opener)
			remember(sk, *opener);
	}
	return 0;
}
