#!/bin/bash
# report: no program starts under a limit of its data segment or its addresses
# kind: memory
# stock: data 12000: hello
# path: any
for limit in 4000 12000 40000; do
    echo "data $limit: $( (ulimit -d $limit; /bin/echo hello) 2>&1)"
done
for limit in 40000 200000; do
    echo "addresses $limit: $( (ulimit -v $limit; /bin/echo hello) 2>&1)"
done
echo "locked 64: $( (ulimit -l 64; /bin/echo hello) 2>&1)"
