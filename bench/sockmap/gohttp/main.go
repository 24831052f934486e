// HTTP by Go: `gohttp server PORT`, `gohttp client PORT SIZE MILLISECONDS CONNECTIONS` (prints requests a second,
// failed), `gohttp proxy PORT TO` (io.Copy both ways).
package main

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"time"
)

func num(i int) int { n, _ := strconv.Atoi(os.Args[i]); return n }
func main() {
	at := "127.0.0.1:" + os.Args[2]
	switch os.Args[1] {
	case "server":
		http.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
			n, _ := strconv.Atoi(r.URL.Path[1:])
			w.Header().Set("Content-Length", strconv.Itoa(n))
			w.Write(bytes.Repeat([]byte("x"), n))
		})
		panic(http.ListenAndServe(at, nil))
	case "proxy":
		l, err := net.Listen("tcp", at)
		if err != nil {
			panic(err)
		}
		for {
			c, _ := l.Accept()
			go func() {
				u, err := net.Dial("tcp", "127.0.0.1:"+os.Args[3])
				if err != nil {
					c.Close()
					return
				}
				go func() { io.Copy(u, c); u.(*net.TCPConn).CloseWrite() }()
				io.Copy(c, u)
				c.Close()
			}()
		}
	case "client":
		conns := num(5)
		tr := &http.Transport{MaxIdleConnsPerHost: conns, DisableCompression: true}
		cl := &http.Client{Transport: tr, Timeout: 3 * time.Second}
		var n, bad int64
		end := time.Now().Add(time.Duration(num(4)) * time.Millisecond)
		var wg sync.WaitGroup
		for i := 0; i < conns; i++ {
			wg.Add(1)
			go func() {
				defer wg.Done()
				for time.Now().Before(end) {
					r, err := cl.Get("http://" + at + "/" + os.Args[3])
					if err != nil {
						atomic.AddInt64(&bad, 1)
						continue
					}
					k, err := io.Copy(io.Discard, r.Body)
					r.Body.Close()
					if err != nil || int(k) != num(3) {
						atomic.AddInt64(&bad, 1)
					} else {
						atomic.AddInt64(&n, 1)
					}
				}
			}()
		}
		wg.Wait()
		fmt.Println(float64(n)/float64(num(4))*1000, bad)
	}
}
