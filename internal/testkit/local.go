package testkit

import (
	"context"
	"crypto/hmac"
	"crypto/pbkdf2"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"fmt"
	"net/url"
	"os"
	"strings"
	"syscall"
	"time"

	"github.com/tidings/tidings/internal/pglocal"
)

// local is a server from the machine's binaries.
type local struct {
	cfg pglocal.Config
	s   *pglocal.Server
}

func startLocal(settings ...string) (server, error) {
	if _, err := pglocal.Find(0); err != nil {
		return nil, err
	}
	dir, err := scratch("postgres")
	if err != nil {
		return nil, err
	}
	return localIn(dir, settings...)
}

// localIn starts a server with its files in dir.
func localIn(dir string, settings ...string) (server, error) {
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	if err := copyCluster(ctx, dir); err != nil {
		return nil, errors.Join(err, os.RemoveAll(dir))
	}
	cfg := pglocal.Config{Dir: dir, Unsafe: true, Settings: localSettings()}
	for _, s := range settings {
		name, value, _ := strings.Cut(s, "=")
		cfg.Settings[name] = value
	}
	s, err := pglocal.Start(ctx, cfg)
	if err != nil {
		return nil, errors.Join(err, os.RemoveAll(dir))
	}
	return &local{cfg: cfg, s: s}, nil
}

func localSettings() map[string]string {
	return map[string]string{
		"wal_level":                  "minimal",
		"dynamic_shared_memory_type": "mmap", // its files go with the data, also when a test kills the server
		"max_wal_senders":            "0",
		"max_prepared_transactions":  "20",
		"max_wal_size":               "256MB",
		"shared_buffers":             "64MB", // several test binaries run at the same time
		"jit":                        "off",  // also for connections that do not come from a pool
	}
}

// hashOnce stores the login's password with 1 iteration of its hash (RFC 5802, section 3) instead
// of 4,096. A client computes the iterations for each connection. Under the race detector that
// takes 10 ms, longer than the rest of the connection.
func hashOnce(ctx context.Context, s server) error {
	u, err := url.Parse(s.url("postgres"))
	if err != nil {
		return err
	}
	password, _ := u.User.Password()
	salt := []byte(rand.Text())
	salted, err := pbkdf2.Key(sha256.New, password, salt, 1, sha256.Size)
	if err != nil {
		return err
	}
	sign := func(key []byte, text string) []byte {
		h := hmac.New(sha256.New, key)
		h.Write([]byte(text))
		return h.Sum(nil)
	}
	stored := sha256.Sum256(sign(salted, "Client Key"))
	encode := base64.StdEncoding.EncodeToString
	return execute(ctx, s, fmt.Sprintf(`ALTER ROLE postgres PASSWORD 'SCRAM-SHA-256$1:%s$%s:%s'`, encode(salt), encode(stored[:]),
		encode(sign(salted, "Server Key"))))
}

func (l *local) url(database string) string { return l.s.URL(database) }

func (l *local) stop() error {
	if err := l.thaw(); err != nil {
		return err
	}
	if err := l.s.Abort(); err != nil { // its data is deleted below
		return err
	}
	return pglocal.Destroy(l.cfg.Dir)
}

func (l *local) ended() bool {
	select {
	case <-l.s.Done():
		return true
	default:
		return false
	}
}

func (l *local) kill() error {
	if l.ended() {
		return l.s.Stop()
	}
	// Freeze first, so that no process starts or ends by itself while the others are killed.
	pids, err := freezeTree(l.s.PID())
	if err != nil {
		return err
	}
	for _, pid := range pids {
		if err := sendSignal(pid, syscall.SIGKILL); err != nil {
			return err
		}
	}
	return l.s.Stop() // waits for the end and unlocks the directory
}

func (l *local) freeze() error {
	_, err := freezeTree(l.s.PID())
	return err
}

func (l *local) thaw() error {
	if l.ended() {
		return nil
	}
	pids, err := tree(l.s.PID())
	if err != nil {
		return err
	}
	for i := len(pids) - 1; i >= 0; i-- { // the postmaster last: it reacts to its children
		if err := sendSignal(pids[i], syscall.SIGCONT); err != nil {
			return err
		}
	}
	return nil
}

func (l *local) restart(ctx context.Context) error {
	if err := l.thaw(); err != nil {
		return err
	}
	if err := l.s.Abort(); err != nil {
		return err
	}
	before := l.s.URL("postgres")
	s, err := pglocal.Start(ctx, l.cfg)
	if err != nil {
		return err
	}
	l.s = s
	if now := s.URL("postgres"); now != before {
		return fmt.Errorf("another process took the port meanwhile: %s became %s", before, now)
	}
	return nil
}

func (l *local) signalBackend(pid int, s syscall.Signal) error { return sendSignal(pid, s) }

// freezeTree stops pid and its descendants, and returns them, pid first, when all have stopped.
func freezeTree(pid int) ([]int, error) {
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) {
		pids, err := tree(pid)
		if err != nil {
			return nil, err
		}
		still := true
		for _, p := range pids {
			if err := sendSignal(p, syscall.SIGSTOP); err != nil {
				return nil, err
			}
			if st, ok := processState(p); ok && st != 'T' && st != 'Z' {
				still = false
			}
		}
		if still {
			if again, err := tree(pid); err != nil || len(again) == len(pids) {
				return pids, err
			}
		}
		if time.Now().After(deadline) {
			return nil, fmt.Errorf("process %d and its children do not stop", pid)
		}
	}
}

func sendSignal(pid int, sig syscall.Signal) error {
	if err := syscall.Kill(pid, sig); err != nil && !errors.Is(err, syscall.ESRCH) {
		return fmt.Errorf("send %s to process %d: %w", sig, pid, err)
	}
	return nil
}
