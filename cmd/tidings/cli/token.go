package cli

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/store"
)

// createdToken is what `tidings token create --json` prints.
type createdToken struct {
	Token    string     `json:"token"`
	TenantID int64      `json:"tenant_id,string"`
	Name     string     `json:"name"`
	Roles    []string   `json:"roles"`
	Expires  *time.Time `json:"expires,omitempty"`
}

func (p Process) tokenCommand() *cobra.Command {
	c := &cobra.Command{Use: "token", Short: "Make bearer tokens for the API"}
	c.AddCommand(p.tokenCreateCommand())
	return c
}

func (p Process) tokenCreateCommand() *cobra.Command {
	var (
		data, expires string
		asJSON        bool
		t             createdToken
	)
	c := &cobra.Command{
		Use:   "create --tenant T --name NAME",
		Short: "Make a token and print it, once: only its hash is kept",
		Args:  cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if t.TenantID <= 0 || t.Name == "" {
				return &usageError{errors.New("token create wants --tenant, a positive number, and --name")}
			}
			var until time.Time
			if expires != "" {
				var err error
				if until, err = parseExpires(expires, time.Now()); err != nil {
					return &usageError{fmt.Errorf("--expires: %w", err)}
				}
				t.Expires = &until
			}
			s, err := p.servers(c.Context(), data)
			if err != nil {
				return err
			}
			pool, err := postgres.Open(c.Context(), s.DatabaseURL, s.Postgres, postgres.RoleSystem, "token")
			if err != nil {
				return err
			}
			defer pool.Close()
			t.Token, err = store.CreateToken(c.Context(), pool, t.TenantID, t.Name, t.Roles, until)
			switch {
			case errors.Is(err, store.ErrInvalid):
				return &usageError{err}
			case errors.Is(err, store.ErrTokenExists):
				return fmt.Errorf("tenant %d has a token named %q already: choose another --name", t.TenantID, t.Name)
			case err != nil:
				return err
			}
			if asJSON {
				return p.writeJSON(t)
			}
			if _, err := fmt.Fprintln(p.Stdout, t.Token); err != nil {
				return fmt.Errorf("write the token: %w", err)
			}
			fmt.Fprintf(p.Stderr, "Token %q of tenant %d, roles %s. Keep it: it is not shown again.\n", t.Name, t.TenantID, strings.Join(t.Roles, ", "))
			return nil
		},
	}
	c.Flags().Int64Var(&t.TenantID, "tenant", 0, "the tenant whose rows it reads and writes")
	c.Flags().StringVar(&t.Name, "name", "", "its name, unique within the tenant: the actor of writes that name none")
	c.Flags().StringSliceVar(&t.Roles, "roles", []string{store.RoleRead, store.RoleWrite}, "some of "+strings.Join(store.Roles(), ","))
	c.Flags().StringVar(&expires, "expires", "", "when it ends: a duration such as 720h, a date, or a time in RFC 3339 (default: never)")
	c.Flags().BoolVar(&asJSON, "json", false, "print one JSON object")
	dataFlag(c, &data)
	return c
}

// parseExpires reads a duration from now on, a date (its first moment in UTC), or a time. It must lie ahead.
func parseExpires(s string, now time.Time) (time.Time, error) {
	var t time.Time
	if d, err := time.ParseDuration(s); err == nil {
		t = now.Add(d)
	} else if t, err = time.Parse(time.DateOnly, s); err != nil {
		if t, err = time.Parse(time.RFC3339, s); err != nil {
			return t, fmt.Errorf("%q is no duration (720h), date (2030-01-31) or time (2030-01-31T12:00:00Z)", s)
		}
	}
	if !t.After(now) {
		return t, fmt.Errorf("%s has passed already", t.UTC().Format(time.RFC3339))
	}
	return t.UTC(), nil
}
