package cli

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/nats-io/jwt/v2"
	"github.com/nats-io/nats.go"

	"github.com/tidings/tidings/internal/testkit"
)

func TestCredentialsOfAnAccountOpenWhatTheirRoleNeeds(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "keys")
	account := func(args ...string) string {
		t.Helper()
		if code, _, stderr := run(t, nil, "", append([]string{"nats", "account", dir}, args...)...); code != exitOK {
			t.Fatal(stderr)
		}
		conf, err := os.ReadFile(filepath.Join(dir, "nats-account.conf"))
		if err != nil {
			t.Fatal(err)
		}
		return string(conf)
	}
	b, out := testkit.NATSWith(t, account("--subscriber", "name=feed,tenant=7")), filepath.Join(dir, "feed.creds")
	creds := []string{"nats", "creds", "--keys", dir, "--out", out, "--role"}
	code, stdout, stderr := run(t, nil, "", append(creds, "subscriber", "--name", "feed", "--tenant", "7", "--expires", "1h")...)
	if code != exitOK || !strings.Contains(stdout, "NATS_INBOX_PREFIX=_INBOX_t7_feed") {
		t.Fatal(stdout, stderr)
	}
	for _, name := range []string{"feed.creds", "TIDINGS.seed", "TENANT_7.seed", "operator.seed"} {
		if info, err := os.Stat(filepath.Join(dir, name)); err != nil || info.Mode().Perm() != 0o600 {
			t.Errorf("%s: %v", name, err)
		}
	}
	text, err := os.ReadFile(out)
	if err != nil {
		t.Fatal(err)
	}
	token, err := jwt.ParseDecoratedJWT(text)
	if err != nil {
		t.Fatal(err)
	}
	claims, err := jwt.DecodeUserClaims(token)
	if err != nil || claims.Expires == 0 || !slices.Equal(claims.Sub.Allow, []string{"live.t7.>"}) || len(claims.Pub.Allow) > 0 ||
		!slices.Equal(claims.Pub.Deny, []string{">"}) {
		t.Errorf("%+v, %v", claims, err)
	}
	nc, err := nats.Connect(b.URL, nats.UserCredentials(out), nats.Timeout(arriveWithin))
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	if _, err := nats.Connect(b.URL); err == nil {
		t.Error("the server takes a user without credentials")
	}
	// A further tenant is a change of the file and a reload, and disturbs nobody.
	if code, _, _ := run(t, nil, "", append(creds, "subscriber", "--name", "feed", "--tenant", "8")...); code != exitInput {
		t.Errorf("credentials of a subscriber that is not in the file: exit code %d", code)
	}
	b.Reload(t, account("--subscriber", "name=feed,tenant=8"))
	other := filepath.Join(dir, "other.creds")
	if code, _, stderr := run(t, nil, "", "nats", "creds", "--keys", dir, "--out", other, "--role", "subscriber", "--name", "feed",
		"--tenant", "8"); code != exitOK {
		t.Fatal(stderr)
	}
	late, err := nats.Connect(b.URL, nats.UserCredentials(other), nats.Timeout(arriveWithin))
	if err != nil {
		t.Fatal(err)
	}
	late.Close()
	if nc.Stats().Reconnects > 0 || !nc.IsConnected() {
		t.Error("another tenant disconnected the first one")
	}
	if _, _, stderr := run(t, nil, "", "nats", "creds", "--keys", dir, "--role", "relay"); !strings.Contains(stderr, "--out is required") {
		t.Errorf("without a file to write: %s", stderr)
	}
	for _, wrong := range [][]string{
		append(creds, "admin"), append(creds, "relay", "--tenant", "7"), append(creds, "subscriber", "--name", "feed", "--tenant", "0"),
		append(creds, "subscriber", "--tenant", "7"), {"nats", "creds", "--role", "relay"},
		{"nats", "users", "--subscriber", "name=x,tenant=0"}, {"nats", "users", "--subscriber", "name=relay"},
		{"nats", "users", "--subscriber", "name=consumer,tenant=7"}, {"nats", "users", "--subscriber", "tenant=7"},
		{"nats", "users", "--subscriber", "name=x,tenant=7,durable=y"}, {"nats", "users", "--subscriber", "nam=x"},
		{"nats", "users", "--subscriber", "name=x,tenant=7", "--subscriber", "name=x,tenant=7"},
		{"nats", "durable", "--tenant", "7"}, {"nats", "durable", "--name", "api"}, {"nats", "durable", "--name", "x", "--since", "now"},
	} {
		if code, _, _ := run(t, nil, "", wrong...); code != exitInput {
			t.Errorf("%q: exit code %d", wrong, code)
		}
	}
}
