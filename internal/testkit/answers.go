package testkit

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
)

// Answers is a proxy to a NATS server that answers some requests itself. Its clients believe that
// the server belongs to a cluster.
type Answers struct {
	target   string
	listener net.Listener
	passing  sync.WaitGroup

	mu    sync.Mutex
	fn    func(subject string, body []byte) []byte
	conns map[net.Conn]bool
}

// NewAnswers returns a proxy to b's server. It ends with the test.
func NewAnswers(t testing.TB, b *Broker) *Answers {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	a := &Answers{target: strings.TrimPrefix(b.URL, "nats://"), listener: l, conns: make(map[net.Conn]bool)}
	a.passing.Go(func() {
		for {
			client, err := l.Accept()
			if err != nil {
				return
			}
			a.passing.Go(func() { a.open(client) })
		}
	})
	t.Cleanup(func() {
		_ = l.Close() // ends the loop above
		a.mu.Lock()
		for c := range a.conns {
			_ = c.Close()
		}
		a.mu.Unlock()
		a.passing.Wait()
	})
	return a
}

// Through returns b as the proxy's clients see it.
func (a *Answers) Through(b *Broker) *Broker {
	through := *b
	through.URL = "nats://" + a.listener.Addr().String()
	through.cfg.URL = through.URL
	return &through
}

// Answer makes fn answer the requests to JetStream's API. The server answers where fn returns nil.
// fn gets the requests of one connection in order. The connection waits for it.
func (a *Answers) Answer(fn func(subject string, body []byte) []byte) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.fn = fn
}

func (a *Answers) open(client net.Conn) {
	server, err := net.DialTimeout("tcp", a.target, 2*time.Second)
	if err != nil {
		_ = client.Close()
		return
	}
	a.mu.Lock()
	a.conns[client], a.conns[server] = true, true
	a.mu.Unlock()
	l := &answered{Answers: a, client: client, subscriptions: make(map[string]string)}
	var both sync.WaitGroup
	for _, pass := range []func() error{func() error { return l.requests(server) }, func() error { return l.answers(server) }} {
		both.Go(func() {
			_ = pass() // it ends with a connection
			_ = client.Close()
			_ = server.Close()
		})
	}
	both.Wait()
	a.mu.Lock()
	delete(a.conns, client)
	delete(a.conns, server)
	a.mu.Unlock()
}

// answered is a connection through the proxy.
type answered struct {
	*Answers
	client        net.Conn
	writing       sync.Mutex        // whole frames to the client
	subscriptions map[string]string // ids by subject; only requests uses it
}

// frame reads one operation of the NATS protocol. args are the parts of its first line, and body is
// its payload.
func frame(r *bufio.Reader) (raw []byte, args []string, body []byte, err error) {
	line, err := r.ReadBytes('\n')
	if err != nil {
		return nil, nil, nil, err
	}
	args = strings.Fields(string(line))
	if len(args) == 0 {
		return line, args, nil, nil
	}
	switch args[0] {
	case "PUB", "HPUB", "MSG", "HMSG":
		size, err := strconv.Atoi(args[len(args)-1])
		if err != nil {
			return nil, nil, nil, fmt.Errorf("read %q: %w", line, err)
		}
		body = make([]byte, size+2)
		if _, err := io.ReadFull(r, body); err != nil {
			return nil, nil, nil, err
		}
		raw = append(line, body...)
		if body = body[:size]; args[0][0] == 'H' {
			headers, err := strconv.Atoi(args[len(args)-2])
			if err != nil {
				return nil, nil, nil, fmt.Errorf("read %q: %w", line, err)
			}
			body = body[headers:]
		}
		return raw, args, body, nil
	}
	return line, args, nil, nil
}

// requests forwards what the client sends, or answers it.
func (l *answered) requests(server net.Conn) error {
	r := bufio.NewReader(l.client)
	for {
		raw, args, body, err := frame(r)
		if err != nil {
			return err
		}
		if len(args) > 2 && args[0] == "SUB" {
			l.subscriptions[args[1]] = args[len(args)-1]
		}
		hasReply := len(args) == 4 && args[0] == "PUB" || len(args) == 5 && args[0] == "HPUB"
		if hasReply && strings.HasPrefix(args[1], "$JS.API.") {
			l.mu.Lock()
			fn := l.fn
			l.mu.Unlock()
			if fn != nil {
				if answer := fn(args[1], body); answer != nil {
					if err := l.write([]byte(fmt.Sprintf("MSG %s %s %d\r\n%s\r\n", args[2], l.subscription(args[2]), len(answer),
						answer))); err != nil {
						return err
					}
					continue
				}
			}
		}
		if _, err := server.Write(raw); err != nil {
			return err
		}
	}
}

// subscription returns the id of the client's subscription to an inbox.
func (l *answered) subscription(inbox string) string {
	if id, ok := l.subscriptions[inbox]; ok {
		return id
	}
	return l.subscriptions[inbox[:strings.LastIndexByte(inbox, '.')]+".*"]
}

// answers forwards what the server sends.
func (l *answered) answers(server net.Conn) error {
	r := bufio.NewReader(server)
	for {
		raw, args, _, err := frame(r)
		if err != nil {
			return err
		}
		if len(args) > 0 && args[0] == "INFO" {
			if raw, err = clustered(raw); err != nil {
				return err
			}
		}
		if err := l.write(raw); err != nil {
			return err
		}
	}
}

func (l *answered) write(raw []byte) error {
	l.writing.Lock()
	defer l.writing.Unlock()
	_, err := l.client.Write(raw)
	return err
}

// clustered returns the server's description of itself with the name of a cluster.
func clustered(line []byte) ([]byte, error) {
	info := make(map[string]any)
	if err := json.Unmarshal(bytes.TrimSpace(bytes.TrimPrefix(line, []byte("INFO"))), &info); err != nil {
		return nil, err
	}
	info["cluster"] = "tidings"
	b, err := json.Marshal(info)
	return []byte("INFO " + string(b) + "\r\n"), err
}

// Past is a proxy through which a server looks like a cluster of three, with a replica of one
// stream on each member. Replicas that know only the messages of an earlier moment may lead.
type Past struct {
	*Answers
	Then *Broker // has the stream of the earlier moment

	now, then *nats.Conn
	stream    string

	leading sync.Mutex
	behind  [3]bool        // the replicas of the earlier moment
	leader  int            // a replica
	stale   map[string]int // the number of next answers from the earlier moment, by the request's verb
}

// NewPast returns a proxy to b. The current moment becomes the earlier one. Only for NATSProcess.
func NewPast(t testing.TB, b *Broker, stream string) *Past {
	t.Helper()
	then := NATSProcessOf(t, b.Copy(t))
	p := &Past{Answers: NewAnswers(t, b), Then: then, now: b.Connect(t), then: then.Connect(t), stream: stream,
		stale: make(map[string]int)}
	p.Answer(p.answer)
	return p
}

// Lead makes the first replica the leader, and puts the given replicas into the past. When a client
// asks the leader to step down, the next replica leads.
func (p *Past) Lead(behind ...int) {
	p.leading.Lock()
	defer p.leading.Unlock()
	p.leader, p.behind = 0, [3]bool{}
	for _, i := range behind {
		p.behind[i] = true
	}
}

// Forget puts the next n answers to a request into the past, whoever leads. The verb is INFO or
// MSG.GET.
func (p *Past) Forget(verb string, n int) {
	p.leading.Lock()
	defer p.leading.Unlock()
	p.stale[verb] = n
}

// Forgot reports whether all answers of Forget were given.
func (p *Past) Forgot(verb string) bool {
	p.leading.Lock()
	defer p.leading.Unlock()
	return p.stale[verb] == 0
}

func (p *Past) answer(subject string, body []byte) []byte {
	verb, ours := strings.CutSuffix(strings.TrimPrefix(subject, "$JS.API.STREAM."), "."+p.stream)
	p.leading.Lock()
	defer p.leading.Unlock()
	if ours && verb == "LEADER.STEPDOWN" {
		p.leader = (p.leader + 1) % len(p.behind)
		return []byte(`{"success": true}`)
	}
	if !ours || verb != "INFO" && verb != "MSG.GET" {
		return nil
	}
	nc := p.now
	if p.behind[p.leader] || p.stale[verb] > 0 {
		nc = p.then
	}
	p.stale[verb] = max(p.stale[verb]-1, 0)
	m, err := nc.Request(subject, body, 5*time.Second)
	if err != nil {
		return []byte(`{"error": {"code": 503, "err_code": 10008, "description": "no leader"}}`)
	}
	if verb == "INFO" {
		return p.describe(m.Data)
	}
	return m.Data
}

// describe adds the replicas to the description of the stream.
func (p *Past) describe(data []byte) []byte {
	var info map[string]any
	if err := json.Unmarshal(data, &info); err != nil || info["config"] == nil {
		return data
	}
	info["config"].(map[string]any)["num_replicas"] = len(p.behind)
	var others []map[string]any
	for i := range p.behind {
		if i != p.leader {
			others = append(others, map[string]any{"name": nodeName(i), "current": true, "active": time.Millisecond})
		}
	}
	info["cluster"] = map[string]any{"name": "tidings", "leader": nodeName(p.leader), "replicas": others,
		"leader_since": time.Now().Add(-time.Hour).UTC()}
	data, err := json.Marshal(info)
	if err != nil {
		return nil
	}
	return data
}
