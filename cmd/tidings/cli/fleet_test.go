package cli

import (
	"bytes"
	"encoding/json"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/tidings/tidings/internal/testkit"
)

// TestCommandsBesideARunningFleet runs commands that change nothing of a running fleet, or settings
// that it respects.
func TestCommandsBesideARunningFleet(t *testing.T) {
	t.Parallel()
	d := newDev(t)
	d.start(t)
	if status, _ := d.request(t, http.MethodPut, "/v1/follows/1/2", "", nil, nil); status != http.StatusCreated {
		t.Fatalf("follow: status %d", status)
	}
	var review struct {
		ID string `json:"review_id"`
	}
	const good = `{"author_id":"7","body":"good","attributes":{"rating":4}}`
	if status, _ := d.request(t, http.MethodPost, "/v1/products/5/reviews", good, nil, &review); status != http.StatusCreated {
		t.Fatalf("review: status %d", status)
	}
	d.verify(t)
	in := d.instance(t)
	nc, err := nats.Connect(in.NATSURL, nats.Timeout(arriveWithin))
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}

	t.Run("history of any kind", func(t *testing.T) {
		for want, args := range map[string][]string{"ACTIVE": {"edge", "1", "2", "--kind", "follow"},
			"rating": {"child", review.ID, "--kind", "review"}} {
			code, stdout, stderr := run(t, nil, "", append([]string{"history", "--tenant", "1", "--data", d.dir}, args...)...)
			if code != exitOK || !strings.Contains(stdout, want) {
				t.Errorf("history %v: exit code %d\n%s%s", args, code, stdout, stderr)
			}
		}
	})

	t.Run("nats durable creates a consumer that gets later events", func(t *testing.T) {
		code, stdout, stderr := run(t, map[string]string{"NATS_URL": in.NATSURL}, "", "nats", "durable", "--name", "mailer",
			"--tenant", "1", "--filter", "follow.created")
		if code != exitOK || !strings.HasPrefix(stdout, "Created consumer t1_mailer on ") {
			t.Fatalf("exit code %d\n%s%s", code, stdout, stderr)
		}
		if status, _ := d.request(t, http.MethodPut, "/v1/follows/1/3", "", nil, nil); status != http.StatusCreated {
			t.Fatalf("follow: status %d", status)
		}
		d.verify(t)
		mailer, err := js.Consumer(t.Context(), "EVENTS-0", "t1_mailer")
		if err != nil {
			t.Fatal(err)
		}
		if info := mailer.CachedInfo(); info.NumPending+uint64(info.NumAckPending) == 0 {
			t.Errorf("the consumer gets nothing: %+v", info)
		}
	})

	t.Run("stream configure sets an age", func(t *testing.T) {
		code, stdout, stderr := run(t, nil, "", "stream", "configure", "--max-age", "48h", "--yes", "--data", d.dir)
		s, err := js.Stream(t.Context(), "EVENTS-0")
		if err != nil {
			t.Fatal(err)
		}
		if age := s.CachedInfo().Config.MaxAge; code != exitOK || age.Hours() != 48 || !strings.Contains(stdout, "age 48h0m0s") {
			t.Errorf("exit code %d, age %s\n%s%s", code, age, stdout, stderr)
		}
	})

	t.Run("consume takes part, and stops in order", func(t *testing.T) {
		ops := testkit.FreeAddr(t)
		cmd := exec.Command(os.Args[0], "consume", "--consumer", "threadcache") // it changes the logger of its process
		cmd.Env = append(d.env, "DATABASE_URL="+in.DatabaseURL, "NATS_URL="+in.NATSURL, "OPS_ADDR="+ops)
		var stderr bytes.Buffer
		cmd.Stderr = &stderr
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		defer func() { _ = cmd.Process.Kill() }() // fails harmlessly after its end
		testkit.Eventually(t, "the consumer to have its share of the partitions", func() (bool, error) {
			resp, err := http.Get("http://" + ops + "/readyz")
			if err != nil {
				return false, err
			}
			return resp.StatusCode == http.StatusOK, resp.Body.Close()
		})
		if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
			t.Fatal(err)
		}
		if err := cmd.Wait(); err != nil {
			t.Errorf("consume: %v\n%s", err, stderr.String())
		}
	})

	t.Run("demo writes what its statistics say", func(t *testing.T) {
		code, stdout, stderr := run(t, nil, "", "demo", "--duration", "500ms", "--rate", "60", "--users", "10", "--seed", "3",
			"--tenant", "7", "--json", "--data", d.dir)
		var r demoResult
		if err := json.Unmarshal([]byte(stdout), &r); err != nil || code != exitOK || r.Writes() == 0 || r.Seed != 3 {
			t.Fatalf("exit code %d, %v\n%s%s", code, err, stdout, stderr)
		}
		d.verify(t)
	})
}
