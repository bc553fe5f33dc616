//! Enums whose variants have names, declared once.

/// Declares an enum with a name for each variant. It gets `ALL`, the variants in the order of their
/// declaration, and `name`. So both always cover all variants.
///
/// ```
/// lighterage_ir::named! {
///     /// A direction.
///     #[derive(Clone, Copy, PartialEq, Eq, Debug)]
///     pub enum Way {
///         /// Towards the device.
///         In = "in",
///         /// Towards the host.
///         Out = "out",
///     }
/// }
/// assert_eq!(Way::ALL.map(Way::name), ["in", "out"]);
/// ```
#[macro_export]
macro_rules! named {
    (
        $(#[$attribute:meta])*
        $visible:vis enum $enum:ident {
            $($(#[$of_variant:meta])* $variant:ident = $name:literal),* $(,)?
        }
    ) => {
        $(#[$attribute])*
        $visible enum $enum {
            $($(#[$of_variant])* $variant),*
        }

        impl $enum {
            /// Every variant, in the order of their declaration.
            $visible const ALL: [$enum; [$($name),*].len()] = [$($enum::$variant),*];

            /// The name in text, options and reports.
            $visible fn name(self) -> &'static str {
                match self {
                    $($enum::$variant => $name,)*
                }
            }
        }
    };
}
