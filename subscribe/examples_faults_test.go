//go:build faults

package subscribe_test

import (
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/testkit"
)

// TestTheExamplesOutsideThisModule builds the examples in another module. It runs two processes of
// each while events are published, processes are killed and the partitions are resized. The search
// index must be exact. No mail may be lost, and the first copies of a user's mails must be in
// order.
func TestTheExamplesOutsideThisModule(t *testing.T) {
	bin := buildOutside(t, "mailer", "search")
	r := newRig(t, 2)
	pool, url := r.schema("search")
	printed := filepath.Join(t.TempDir(), "mails")
	out, err := os.OpenFile(printed, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	var all []*program
	for i := range 4 {
		p := &program{t: t, path: filepath.Join(bin, []string{"mailer", "search"}[i%2]), out: out,
			env: []string{"NATS_URL=" + r.b.URL, "DATABASE_URL=" + url}}
		all = append(all, p)
		t.Cleanup(func() {
			if p.cmd.ProcessState == nil {
				_ = p.cmd.Process.Kill()
				_ = p.cmd.Wait()
			}
			if t.Failed() {
				t.Logf("%s:\n%s", filepath.Base(p.path), &p.errs)
			}
		})
	}
	tried := tryPage(t, filepath.Join(bin, "first"), r.b.URL)
	rng := rand.New(rand.NewPCG(1, uint64(time.Now().UnixNano())))
	w := &truth{versions: map[event.ID]int64{}, comments: map[string]event.Child{}, posts: map[event.ID]int64{}}
	w.write(r, rng, 100)
	for _, p := range all {
		p.start()
	}
	for round := range 4 {
		w.write(r, rng, 150)
		p := all[(round+rng.IntN(2)*2)%4] // a mailer and a search in turn
		_ = p.end(syscall.SIGKILL)
		if round == 1 {
			r.resize(3)
		}
		w.write(r, rng, 100)
		p.start()
	}
	testkit.Eventually(t, "an exact index", func() (bool, error) { return w.exact(t.Context(), pool) })
	w.awaitMails(t, printed)
	for _, p := range all {
		if err := p.end(syscall.SIGTERM); err != nil {
			t.Errorf("%s, stopped: %v", filepath.Base(p.path), err)
		}
	}
	w.mails(t, printed).firstsInOrder(t)
	if ok, err := w.exact(t.Context(), pool); !ok {
		t.Errorf("at the end: %v", err)
	}
	tried()
	w.counts(r, filepath.Join(bin, "followers"))
	w.backfills(r, rng, filepath.Join(bin, "search"))
	find := exec.Command(filepath.Join(bin, "search"), "word1")
	find.Env = append(os.Environ(), "DATABASE_URL="+url)
	if got, err := find.CombinedOutput(); err != nil || !strings.HasPrefix(string(got), "post ") && len(got) > 0 {
		t.Errorf("search word1: %s, %v", got, err)
	}
}
