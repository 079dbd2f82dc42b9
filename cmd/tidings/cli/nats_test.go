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
	dir := filepath.Join(t.TempDir(), "keys")
	if code, _, stderr := run(t, nil, "", "nats", "account", dir); code != exitOK {
		t.Fatal(stderr)
	}
	if code, _, stderr := run(t, nil, "", "nats", "account", dir); code != exitError || !strings.Contains(stderr, "exists") {
		t.Errorf("a second account in the same place: %d, %s", code, stderr)
	}
	conf, err := os.ReadFile(filepath.Join(dir, "nats-account.conf"))
	if err != nil {
		t.Fatal(err)
	}
	b, out := testkit.NATSWith(t, string(conf)), filepath.Join(dir, "acme.creds")
	creds := []string{"nats", "creds", "--account-seed", filepath.Join(dir, "account.seed"), "--out", out, "--role"}
	code, stdout, stderr := run(t, nil, "", append(creds, "subscriber", "--name", "acme", "--tenant", "7", "--expires", "1h")...)
	if code != exitOK || !strings.Contains(stdout, "NATS_INBOX_PREFIX=_INBOX_acme") {
		t.Fatal(stdout, stderr)
	}
	for _, name := range []string{"acme.creds", "account.seed", "operator.seed"} {
		if info, err := os.Stat(filepath.Join(dir, name)); err != nil || info.Mode().Perm() != 0o600 {
			t.Errorf("%s: %v, %v", name, info.Mode(), err)
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
	nc.Close()
	if _, err := nats.Connect(b.URL); err == nil {
		t.Error("the server takes a user without credentials")
	}
	for _, wrong := range [][]string{
		append(creds, "admin"), append(creds, "relay", "--tenant", "7"), append(creds, "subscriber", "--tenant", "0"),
		{"nats", "creds", "--role", "relay"},
		{"nats", "users", "--subscriber", "name=x,tenant=0"}, {"nats", "users", "--subscriber", "name=relay"},
		{"nats", "users", "--subscriber", "nam=x"},
	} {
		if code, _, _ := run(t, nil, "", wrong...); code != exitInput {
			t.Errorf("%q: exit code %d", wrong, code)
		}
	}
}
