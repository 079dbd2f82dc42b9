package cli

import (
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
)

// TestReadyIsTheAnswerOfTheService checks the exit code for each form of OPS_ADDR.
func TestReadyIsTheAnswerOfTheService(t *testing.T) {
	status := http.StatusOK
	service := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/readyz" {
			t.Errorf("asked for %s", r.URL.Path)
		}
		w.WriteHeader(status)
		if _, err := w.Write([]byte(`{"failing":"postgres"}`)); err != nil {
			t.Error(err)
		}
	}))
	defer service.Close()
	_, port, err := net.SplitHostPort(service.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		addr, flag   string
		status, code int
		says         string
	}{
		{addr: "0.0.0.0:" + port, status: 200, code: exitOK},
		{addr: ":" + port, status: 200, code: exitOK},
		{addr: "127.0.0.1:" + port, status: 503, code: exitError, says: `status 503: {"failing":"postgres"}`},
		{addr: "127.0.0.1:1", flag: service.URL + "/readyz", status: 200, code: exitOK},
		{addr: "127.0.0.1:1", status: 200, code: exitError, says: "refused"},
		{status: 200, code: exitInput, says: "OPS_ADDR"},
	} {
		status = c.status
		args := []string{"ready"}
		if c.flag != "" {
			args = append(args, "--url", c.flag)
		}
		code, stdout, stderr := run(t, map[string]string{"OPS_ADDR": c.addr}, "", args...)
		if code != c.code || stdout != "" || !strings.Contains(stderr, c.says) || c.says == "" && stderr != "" {
			t.Errorf("OPS_ADDR %q, --url %q: exit code %d, %q", c.addr, c.flag, code, stderr)
		}
	}
}
