/* Receive-CPU-Selection: on which CPU did the application last read this
 * socket? steer.bpf.c sends the next packets there.
 *
 * An entry that outlives its connection is harmless: the first read of the next
 * connection with these addresses corrects it, and the map forgets the least
 * used.
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

/* Connections of this network namespace only. */
const volatile __u64 netns = 0;

/* The map of this name in steer.bpf.c. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 65536);
	__type(key, struct flow);
	__type(value, __u32);
} flows SEC(".maps");

SEC("tp_btf/tcp_rcv_space_adjust")
int BPF_PROG(reads, struct sock *sk)
{
	struct sock_common *common = &sk->__sk_common;
	__u32 cpu = bpf_get_smp_processor_id() + 1;
	struct flow flow = {};
	__u32 *seen;

	if (common->skc_net.net->net_cookie != netns)
		return 0;
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
		return 0;
	}
	flow.local_port = common->skc_num;
	flow.remote_port = bpf_ntohs(common->skc_dport);
	seen = bpf_map_lookup_elem(&flows, &flow);
	if (seen)
		*seen = cpu;
	else
		bpf_map_update_elem(&flows, &flow, &cpu, BPF_ANY);
	return 0;
}
