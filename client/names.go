package client

import "encoding/json"

// decode decodes JSON into v. If n is not nil, it first replaces a kind's names with the
// archetype's names of v's type.
func decode(n names, data []byte, v any) (err error) {
	if n != nil {
		if data, err = n.rename(data); err != nil {
			return err
		}
	}
	return json.Unmarshal(data, v)
}

// rename renames the members of objects, at any depth. It leaves the names within attributes, which
// the kind chose.
func (n names) rename(data []byte) ([]byte, error) {
	switch first(data) {
	case '[':
		var list []json.RawMessage
		if err := json.Unmarshal(data, &list); err != nil {
			return nil, err
		}
		for i := range list {
			var err error
			if list[i], err = n.rename(list[i]); err != nil {
				return nil, err
			}
		}
		return json.Marshal(list)
	case '{':
		var members map[string]json.RawMessage
		if err := json.Unmarshal(data, &members); err != nil {
			return nil, err
		}
		renamed := make(map[string]json.RawMessage, len(members))
		for name, v := range members {
			if name != "attributes" {
				var err error
				if v, err = n.rename(v); err != nil {
					return nil, err
				}
			}
			if as, ok := n[name]; ok {
				name = as
			}
			renamed[name] = v
		}
		return json.Marshal(renamed)
	}
	return data, nil
}

// first returns the first byte of a JSON value.
func first(data []byte) byte {
	for _, c := range data {
		if c != ' ' && c != '\n' && c != '\t' && c != '\r' {
			return c
		}
	}
	return 0
}
