/* Which listen socket gets a connection: the local one of the CPU that handles
 * the SYN. One instance per listener group (the sockets that share an address).
 *
 * Constant time: one lookup of the slot, one of the socket, whatever the number
 * of sockets. The slot of a CPU without a worker points to some worker; a worker
 * that has died leaves its place in `sockets` by itself, and until the slots are
 * filled again its connections go to the global listen socket, which everybody
 * serves. The same when a listen socket is closed with connections in its queue:
 * the kernel asks where to migrate them.
 */
#include "vmlinux.h"
#include <bpf/bpf_helpers.h>
#include "balance.h"
#include "counters.h"

char LICENSE[] SEC("license") = "GPL";

/* Place of the global listen socket in `sockets`. */
#define GLOBAL 0
/* A slot's value: the place of a socket, and whether its worker runs on the
 * slot's own CPU. */
#define PLACE 0xffff
#define OWN 0x80000000

/* A power of two minus one each; set before loading. `cpu_mask` covers all
 * possible CPUs, `sub_mask` the slots of one CPU. */
const volatile __u32 cpu_mask;
const volatile __u32 sub_mask;
const volatile __u32 sub_shift;

/* The global listen socket, and the local one of each worker. The kernel
 * removes a socket that is closed. */
struct {
	__uint(type, BPF_MAP_TYPE_REUSEPORT_SOCKARRAY);
	__uint(max_entries, 1024);
	__type(key, __u32);
	__type(value, __u64);
} sockets SEC(".maps");

/* By CPU, and within a CPU by the connection's hash: more workers than CPUs
 * share theirs. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u32);
} slots SEC(".maps");

enum selection {
	/* SYNs for which a socket was selected. */
	LOOKUPS,
	/* ... of a worker of this CPU. */
	SELF,
	/* ... of a worker of another CPU: this one has none. */
	OTHER,
	/* The first choice had died, and the slot beside it had not. */
	BESIDE,
	/* Nobody: the global listen socket. */
	TO_GLOBAL,
	/* Not even that: the kernel chose. */
	TO_KERNEL,
	/* Connections and handshakes of a socket that was closed. */
	MIGRATED,
	SELECTIONS,
};
COUNTERS(selections, SELECTIONS);

static __always_inline bool from_slot(struct sk_reuseport_md *ctx, __u32 slot, bool first)
{
	__u32 *value = bpf_map_lookup_elem(&slots, &slot);
	__u32 place, is_own;

	if (!value)
		return false;
	place = *value & PLACE;
	is_own = *value & OWN;
	if (place == GLOBAL || bpf_sk_select_reuseport(ctx, &sockets, &place, 0))
		return false;
	added(place);
	if (!first)
		COUNT(selections, BESIDE);
	else if (is_own)
		COUNT(selections, SELF);
	else
		COUNT(selections, OTHER);
	return true;
}

SEC("sk_reuseport/migrate")
int select_listener(struct sk_reuseport_md *ctx)
{
	__u32 place = GLOBAL;

	if (ctx->migrating_sk) {
		COUNT(selections, MIGRATED);
	} else {
		__u32 base = (bpf_get_smp_processor_id() & cpu_mask) << sub_shift;
		__u32 sub = ctx->hash & sub_mask;

		COUNT(selections, LOOKUPS);
		if (from_slot(ctx, base | sub, true) || from_slot(ctx, base | (sub ^ (sub_mask & 1)), false))
			return SK_PASS;
	}
	if (bpf_sk_select_reuseport(ctx, &sockets, &place, 0)) {
		/* Nobody holds it any more. */
		if (!ctx->migrating_sk) {
			COUNT(selections, TO_KERNEL);
			stirred();
		}
		return SK_PASS;
	}
	if (!ctx->migrating_sk)
		COUNT(selections, TO_GLOBAL);
	return SK_PASS;
}
